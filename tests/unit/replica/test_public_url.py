"""The address that a replica announces can be called, whatever it listens on."""

import httpx
import pytest

from infra.settings import Settings
from serving.replica.main import public_url


@pytest.mark.parametrize(
    ("replica", "url"),
    [
        ({"host": "127.0.0.1", "port": 8101}, "http://127.0.0.1:8101"),
        ({"host": "::1", "port": 8101}, "http://[::1]:8101"),
        ({"host": "0.0.0.0", "port": 8101, "public_url": "http://gpu-3:80"}, "http://gpu-3:80"),
    ],
)
def test_an_address_is_a_url(replica: dict[str, object], url: str) -> None:
    found = public_url(Settings.model_validate({"replica": replica}))
    assert found == url
    assert httpx.URL(found).host == httpx.URL(url).host
