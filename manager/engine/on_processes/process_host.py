"""The process that workers are forked from.

``python -m manager.engine.on_processes.process_host FD PATIENCE_S WORKERS_FD [DIRECTORY..]`` starts it. It imports
everything that a worker needs, then reads one line from standard input, ``{"job": "path/to/file.py:name", "log":
"workers.log"}``, and imports the job's modules, if a job is named. Without such a line it ends.

It imports once, and has no thread and no device: a fork of it becomes a worker in milliseconds, whereas a new process
needs seconds for its imports. Managers connect to its ``ControlSocket``, which greets each with ``{"host": pid,
"store": pid, "vms": {"vm0": pid}}``. Requests:

- ``{"worker": "vm0", "namespace": null, "home": "{..}"}`` starts a worker; ``home`` says where it calls.
- ``{"store": "127.0.0.1", "port": 0, "namespace": null}`` starts a store, and ends the earlier one. The file descriptor
  of a connection comes with it, on which the store sends its port.
- ``{"settled": true}`` says that a successor of this manager could find it: if it is killed, the host waits for one.
- ``{"end": true}`` ends every child and this process. If no manager connects for PATIENCE_S, they end too, and the
  directories and the first manager's network namespaces are removed.

The first two are answered with ``{"pid": ..}`` or ``{"error": ".."}``.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # while importing: the imported objects stay in memory, and collecting takes a fifth of the time
    from manager.engine.on_processes.forking import main

    main()
