from tests.system.conftest import calibrated as calibrated
