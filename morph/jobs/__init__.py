"""Jobs: what a user defines, the files that define it, and the snapshot on which a run trains."""
