"""Where numba keeps what it compiles of Morph's loops: once for a user, wherever the code lies.

Numba keeps it beside the file that has a function, and looks for it by that file's path. On each VM that file has
another one, which goes with the VM's node: every node on a host, and every start of it, compiled the same anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from morph.user_cache import cache_folder, keep_as_it_is

_FOLDER = "loops"


def kept_for_user(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as if its file lay in this user's cache; itself where nothing can be kept there.

    The file is a copy by a name that stands for its content, numba's version and the processor: what was compiled of
    other code, or for another processor on shared storage, is not found.
    """
    import numba
    from numba.core.registry import cpu_target

    assert isinstance(loop, FunctionType)
    try:
        source = Path(loop.__code__.co_filename).read_bytes()
    except OSError:  # it lies in an archive
        return loop
    about = f"{numba.__version__} {cpu_target.target_context.codegen().magic_tuple()}\n".encode()
    name = f"loops_{hashlib.sha256(about + source).hexdigest()}.py"
    copy = keep_as_it_is(cache_folder() / _FOLDER, name, source)
    if copy is None:
        return loop
    return FunctionType(loop.__code__.replace(co_filename=str(copy)), loop.__globals__, loop.__name__)
