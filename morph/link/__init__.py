"""What both ends of a connection of a run have in common: messages, proofs and certificates. No socket is opened."""
