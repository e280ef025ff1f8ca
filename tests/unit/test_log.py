"""Logging: one line per event, the same form for our records and those of libraries."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from infra import log
from infra.settings import Settings


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Settings(log_json=True))
    structlog.get_logger("serving.test").bind(replica_id="replica-0").info("version_published", version="12+40")
    logging.getLogger("library").warning("said %s", "this")
    logging.getLogger("httpx").info("quiet")
    structlog.get_logger().debug("too_fine")
    ours, theirs = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert ours["event"] == "version_published"
    assert (ours["replica_id"], ours["version"], ours["level"]) == ("replica-0", "12+40", "info")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("said this", "library", "warning")
    assert ours["timestamp"].endswith("Z")


def test_text_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Settings(log_level="warning"))
    logger = structlog.get_logger("test")
    logger.info("hidden")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("step_failed")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "step_failed" in err
    assert "ValueError: broken" in err
