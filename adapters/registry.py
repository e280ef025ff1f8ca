"""The MLflow registry: adapters as registered models ``collm.<adapter>``, their versions as LoggedModels.

A version holds PEFT's two files and nothing else. Calls block: with the server away for some seconds, with a hung one
up to the timeouts below; never call them where requests are served.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from adapters.model import LoraWeights
from adapters.ports import Registered
from adapters.weights import PEFT_CONFIG, PEFT_WEIGHTS, save_peft
from db.records import AdapterName, VersionUid
from infra.errors import RegistryUnavailable, UnknownVersion

EXPERIMENT = "collm"
MODEL_TYPE = "lora-adapter"
UID_TAG = "uid"
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # MLflow's own: seven retries of 120 s each.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }
)
"""What MLflow's client reads from the environment, some of it at import; what is set already stays."""


def model_name(adapter: AdapterName) -> str:
    """Return the registered model's name."""
    return f"collm.{adapter}"


class MlflowRegistry:
    """An ``AdapterStore`` on an MLflow server. Raises ``RegistryUnavailable`` if the server is away or fails."""

    def __init__(self, url: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Not at the top: the import takes two seconds, and reads the environment.
        from mlflow import MlflowClient, artifacts
        from mlflow.exceptions import MlflowException

        self._url = url
        self._client = MlflowClient(tracking_uri=url, registry_uri=url)
        self._artifacts = artifacts
        self._failure: type[Exception] = MlflowException

    def register(
        self,
        adapter: AdapterName,
        uid: VersionUid,
        weights: LoraWeights,
        *,
        base_model: str,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> Registered:
        """See ``AdapterStore``. One that breaks off leaves a run and no version; the next one makes both."""
        with self._calls():
            found = self._find(adapter, uid)
            if found is not None:
                return found
            with self._tolerating("RESOURCE_ALREADY_EXISTS"):
                self._client.create_registered_model(model_name(adapter))
            experiment = self._experiment()
            run = self._client.create_run(experiment, run_name=f"{adapter}-{uid[:8]}", tags=dict(tags)).info.run_id
            all_tags = {**tags, UID_TAG: uid}
            model_id = self._client.create_logged_model(
                experiment,
                name=f"{adapter}-{uid[:8]}",
                source_run_id=run,
                tags=all_tags,
                params={
                    "base_model": base_model,
                    "r": str(weights.spec.rank),
                    "lora_alpha": str(weights.spec.alpha),
                    "target_modules": ",".join(weights.spec.targets),
                },
                model_type=MODEL_TYPE,
            ).model_id
            with tempfile.TemporaryDirectory(prefix="collm-") as folder:
                save_peft(Path(folder), weights, base_model)
                self._client.log_model_artifacts(model_id, folder)
            self._client.finalize_logged_model(model_id, "READY")
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._client.log_metric(run, name, value, model_id=model_id)
            self._client.set_terminated(run)
            version = self._client.create_model_version(
                model_name(adapter),
                source=f"models:/{model_id}",
                run_id=run,
                tags=all_tags,
                model_id=model_id,
                await_creation_for=0,  # the files are there already
            )
            return Registered(number=int(version.version), model_id=model_id)

    def set_alias(self, adapter: AdapterName, alias: str, number: int | None) -> None:
        """See ``AdapterStore``."""
        with self._calls(f"adapter {adapter!r} has no version {number}"):
            if number is not None:
                self._client.set_registered_model_alias(model_name(adapter), alias, str(number))
                return
            with self._tolerating("RESOURCE_DOES_NOT_EXIST"):
                self._client.delete_registered_model_alias(model_name(adapter), alias)

    def alias(self, adapter: AdapterName, alias: str) -> int | None:
        """See ``AdapterStore``."""
        with self._calls(), self._tolerating("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return int(self._client.get_model_version_by_alias(model_name(adapter), alias).version)
        return None

    def tag(self, adapter: AdapterName, number: int, tags: Mapping[str, str]) -> None:
        """See ``AdapterStore``."""
        with self._calls(f"adapter {adapter!r} has no version {number}"):
            for key, value in tags.items():
                self._client.set_model_version_tag(model_name(adapter), str(number), key, value)

    def download(self, adapter: AdapterName, number: int, target: Path) -> Path:
        """See ``AdapterStore``."""
        target.mkdir(parents=True, exist_ok=True)
        with (
            self._calls(f"adapter {adapter!r} has no version {number}"),
            tempfile.TemporaryDirectory(prefix="collm-") as folder,
        ):
            # Not by ``models:/…``: that would open a default store beside the server named here.
            source = self._client.get_model_version_download_uri(model_name(adapter), str(number))
            found = Path(self._artifacts.download_artifacts(source, dst_path=folder, tracking_uri=self._url))
            for name in (PEFT_CONFIG, PEFT_WEIGHTS):
                if not (found / name).is_file():
                    raise UnknownVersion(f"adapter {adapter!r} version {number} holds no {name}")
                shutil.move(found / name, target / name)
        return target

    def _find(self, adapter: AdapterName, uid: VersionUid) -> Registered | None:
        """Return the version with that uid, the lowest number if there are several."""
        query = f"name = '{model_name(adapter)}' AND tags.`{UID_TAG}` = '{uid}'"
        versions = self._client.search_model_versions(query)
        if not versions:
            return None
        first = min(versions, key=lambda version: int(version.version))
        return Registered(number=int(first.version), model_id=first.source.removeprefix("models:/"))

    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            with self._tolerating("RESOURCE_ALREADY_EXISTS"):
                return str(self._client.create_experiment(EXPERIMENT))
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
        return str(experiment.experiment_id)

    @contextmanager
    def _calls(self, unknown: str = "not registered") -> Iterator[None]:
        """Turn MLflow's errors into ours."""
        try:
            yield
        except self._failure as e:
            if _code(e) == "RESOURCE_DOES_NOT_EXIST":
                raise UnknownVersion(unknown) from e
            raise RegistryUnavailable(f"MLflow at {self._url}: {str(e).splitlines()[0]}") from e

    @contextmanager
    def _tolerating(self, *codes: str) -> Iterator[None]:
        """Leave the block quietly on an error that says the work is done already."""
        try:
            yield
        except self._failure as e:
            if _code(e) not in codes:
                raise


def _code(error: Exception) -> str:
    return str(getattr(error, "error_code", ""))
