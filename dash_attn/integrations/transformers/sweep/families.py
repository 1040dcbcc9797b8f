"""Which model classes of the installed Transformers stand for a family (a `model_type`)."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

# The classes that people train, first; a family is shown by the first that it has.
TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)


def families() -> list[str]:
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys(), key=str.lower)


def config_class(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def architectures(family: str) -> list[Any]:
    """Model classes in the order in which they are tried; the base model comes after those that people train."""
    import transformers
    from transformers.models.auto import modeling_auto

    tables = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS] + ["MODEL_MAPPING_NAMES"]
    tables += [x for x in dir(modeling_auto) if x.startswith("MODEL_FOR_") and x.endswith("_MAPPING_NAMES")]
    names: list[str] = []
    for table in dict.fromkeys(tables):
        entry = getattr(modeling_auto, table).get(family, ())
        names += [entry] if isinstance(entry, str) else list(entry)
    classes = [getattr(transformers, name, None) for name in dict.fromkeys(names)]
    return [x for x in classes if x is not None] + _by_config(family)


def causal_names() -> set[str]:
    """Classes of causal language models. Those of encoders are causal only if the config says is_decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _by_config(family: str) -> list[Any]:
    """Parts of larger models have no entry in Transformers' tables: the modules beside the config have them."""
    from transformers import PreTrainedModel

    config = config_class(family)
    folder = Path(inspect.getfile(config)).parent
    package = config.__module__.rpartition(".")[0]
    classes = []
    for file in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"{package}.{file.stem}")
        classes += [x for _, x in inspect.getmembers(module, inspect.isclass) if x.__module__ == module.__name__]
    return [
        x
        for x in classes
        if issubclass(x, PreTrainedModel)
        and getattr(x, "config_class", None) is config
        and not x.__name__.endswith("PreTrainedModel")
    ]
