"""A wrong option is refused in a moment: no plugin module of these loads torch."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("single", "ddp", "fsdp", "activation_checkpointing", "precision", "adamw")


def test_importing_the_plugins_loads_no_torch() -> None:
    imports = "".join(f"import flava_tnt_plugins.{module}; " for module in MODULES)
    check = "assert not any(name.partition('.')[0] == 'torch' for name in sys.modules), 'torch was loaded'"
    subprocess.run([sys.executable, "-c", f"import sys; {imports}{check}"], check=True, timeout=60)


def test_every_plugin_states_the_contracts_version_and_describes_its_options() -> None:
    from flava_tnt.plugin import API_VERSION, Plugin
    from flava_tnt_plugins import activation_checkpointing, adamw, ddp, fsdp, precision, single

    found = {
        value
        for module in (activation_checkpointing, adamw, ddp, fsdp, precision, single)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Plugin) and "api_version" in vars(value)
    }
    assert {plugin.__name__ for plugin in found} >= {
        "Single", "Ddp", "Fsdp", "Full", "Selective", "Fp32", "Bf16", "Fp16", "AdamW",
    }  # fmt: skip
    for plugin in found:
        assert plugin.api_version == API_VERSION
        assert plugin.__doc__
        for name, field in plugin.model_fields.items():
            assert field.description, f"{plugin.__name__}.{name}"
