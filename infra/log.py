"""Logging: one line per state change, as text or JSON on standard error.

``structlog.get_logger()`` gives a logger; an event is a snake_case verb phrase, context is bound
(``log.info("version_published", adapter="code", version="12+40")``). Libraries' own records take the same form.
"""

import logging
import sys

import structlog

from infra.settings import Settings

QUIET = ("httpx", "httpcore", "urllib3", "alembic", "filelock", "asyncio", "uvicorn.access")
"""Loggers that tell only of trouble."""

PLAIN_TRACEBACK = structlog.dev.plain_traceback
"""The default shows local variables: a token is one."""


def configure(settings: Settings) -> None:
    """Set up logging for this process; called once in its ``main``."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if settings.log_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=PLAIN_TRACEBACK)]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
