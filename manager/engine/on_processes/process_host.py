"""The process that workers are forked from.

``python -m manager.engine.on_processes.process_host FD PATIENCE_S WORKERS_FD [DIRECTORY..]`` starts it. It imports
everything that a worker needs, then reads one line from standard input, ``{"job": "path/to/file.py:name", "log":
"workers.log"}``, and imports the job's modules, if a job is named. Without such a line it ends.

It imports once, and has no thread and no device: a fork of it becomes a worker in milliseconds, whereas a new process
needs seconds for its imports. Managers connect to its ``ControlSocket``. Requests:

``{"worker": "vm0", "namespace": null, "home": "{..}"}``, where ``home`` says where the worker calls, ``{"store":
"127.0.0.1", "port": 0, "namespace": null}`` with the file descriptor of a connection on which the store sends its port;
an earlier store ends, ``{"settled": true}``, which is not answered.

Answers: ``{"pid": ..}`` or ``{"error": ".."}``. Every manager is greeted with ``{"host": pid, "store": pid, "vms":
{"vm0": pid}}``.
At ``{"end": true}``, or when no manager comes any more, every child is killed; if no manager requested that, the
directories and the first manager's network namespaces are removed too.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # while importing: the imported objects stay in memory, and collecting takes a fifth of the time
    from manager.engine.on_processes.forking import main

    main()
