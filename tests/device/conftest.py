from tests.device.link_contract import pair, store

__all__ = ["pair", "store"]
