"""The files of the playground: a strict policy, no token, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from treeward.serving.playground.routes import CONTENT_SECURITY_POLICY, OPEN_PATHS


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_files_have_a_strict_policy_and_need_no_token(
    make_service: Callable[..., Any], asgi_client: Callable[..., Any], path: str
) -> None:
    client = asgi_client(make_service(), token="open-sesame")
    got = client.get(path)
    assert got.status_code == 200 and got.content
    assert "unsafe" not in CONTENT_SECURITY_POLICY and CONTENT_SECURITY_POLICY.startswith("default-src 'none'")
    assert got.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert got.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in got.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in got.text
    again = client.get(path, headers={"If-None-Match": got.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_nothing_else_is_open(make_service: Callable[..., Any], asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(make_service(), token="open-sesame")
    for path in ("/playground/routes.py", "/playground/", "/playground/../metrics", "/v1/models", "/v1/rewards/trace"):
        assert client.get(path).status_code == 401, path


def test_all_files_of_the_page_are_served() -> None:
    names = {file.name for file in resources.files("treeward.serving.playground").iterdir() if file.is_file()}
    served = {"page.html" if path == "/" else path.rpartition("/")[2] for path in OPEN_PATHS}
    assert {name for name in names if not name.endswith(".py")} == served


def test_it_can_be_left_out(make_service: Callable[..., Any], asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(make_service(playground=False))
    assert {client.get(path).status_code for path in OPEN_PATHS} == {404}
