"""What Ray's head node runs where it would start a worker: nothing.

Whoever has Ray's token may ask for a task or actor on the head node, which is the manager's machine. It waits there for
a worker that never comes.
"""

import sys

sys.exit("no worker runs on the head node")
