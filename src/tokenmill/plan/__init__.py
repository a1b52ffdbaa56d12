"""Planning a service before it is there: cost models of its steps, and loads played to it on virtual time.

from tokenmill.plan import evaluate

found = evaluate("cluster.toml", {"request_rate": 4, "num_prompts": 200}, {"ttft": 500, "tpot": 50})
"""

from .config import Config, read_config
from .evaluate import Evaluation, evaluate

__all__ = ["Config", "Evaluation", "evaluate", "read_config"]
