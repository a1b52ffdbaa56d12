"""A model family: Orion, which is Llama with layer norms. A family is declared as a small difference from the common
decoder; kernels, loader and scheduler know only such differences. The entry point has the name that config.json gives
in `architectures` (or a GGUF file in `general.architecture`)."""

from tokenmill.formats.config_key import DECODER, ends, keys, sizes
from tokenmill.models.family import Family
from tokenmill.plugins.groups import Plugin

ORION = Family(
    "Orion",
    norm="layer",
    keys=keys(
        **DECODER | sizes(84_608, 5120, 15_360, 40, 40, None, 4096) | ends(1, 2) | {"rms_norm_eps": 1e-5},
    ),
)

plugin = Plugin(interface=1, provides=ORION)
