from tests.device.device_crew import crew, job, reference
from tests.device.link_contract import pair, store

__all__ = ["crew", "job", "pair", "reference", "store"]
