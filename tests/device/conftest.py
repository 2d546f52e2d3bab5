from tests.device.link_contract import pair, store
from tests.runtime.conftest import job, reference

__all__ = ["job", "pair", "reference", "store"]
