"""The options that say which models and probes to use, and how a run goes: the same for every command that runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config import ModelConfig, RunConfig, SamplingConfig
from ..errors import ConfigError
from ..policy import make_policy
from ..reasoner import Sources
from ..roles import PROBE_ROLES, ProbeRole
from .options import config_options, configs

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)

_FILES = (
    click.option(
        "--pair",
        help="A pair by name, or a manifest (.toml). Default: the default pair, or tiny where that was not pulled.",
    ),
    click.option("-m", "--model", "--target", "target", type=_FILE, help="The target, a GGUF file."),
    click.option(
        "-md", "--model-draft", "--draft-model", "--draft", "draft", type=_FILE, help="The draft, a GGUF file."
    ),
    click.option("--target-probe", type=_FILE, help="The target's probe, an ONNX file. Default: the pair's own."),
    click.option("--draft-probe", type=_FILE, help="The draft's probe, an ONNX file. Default: the pair's own."),
    click.option("--joint-probe", type=_FILE, help="The probe of both, an ONNX file. Default: the pair's own."),
)

_RUN = (
    config_options(RunConfig, SamplingConfig, ModelConfig),
    click.option(
        "--min-acceptance-ratio",
        type=float,
        help="The ratio floor: --threshold, by its name for policies that compare target with draft.",
    ),
    click.option(
        "--max-accept-error",
        type=click.FloatRange(0, 1, True, True),
        help="Take the threshold that keeps errors among accepted steps below this share; see probe calibrate.",
    ),
)

_COSTS = (config_options(RunConfig, only=["policy"]), config_options(SamplingConfig, ModelConfig))


def model_options(command: F) -> F:
    """Add the options for models, probes and the run."""
    return with_options(command, *_FILES, *_RUN)


def cost_options(command: F) -> F:
    """Add those of these options that change what a token costs."""
    return with_options(command, *_FILES, *_COSTS)


def loading_options(command: F) -> F:
    """Add those that say which files are loaded, and how."""
    return with_options(command, *_FILES, config_options(ModelConfig))


def bench_options(command: F) -> F:
    """Add those of these options that are the same for every arm of a benchmark."""
    shared = config_options(RunConfig, only=["max_tokens", "max_step_tokens", "n_prime", "answer_by", "think_budget"])
    return with_options(command, *_FILES, shared, config_options(SamplingConfig, ModelConfig))


def with_options(command: F, *options: Callable[[F], F]) -> F:
    """Add options, so that help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def run_configs(options: dict[str, Any]) -> tuple[RunConfig, ModelConfig]:
    """The configurations that the options describe; a wrong policy is said before any file is looked for."""
    _fold_ratio_floor(options)
    config, models = configs(options)
    make_policy(config.policy, config.threshold)
    return config, models


def sources_of(options: dict[str, Any]) -> Sources:
    """The files that the options name."""
    check_naming(options)
    if options["target"] is None:
        found = Sources.from_pair(options["pair"])
        return replace(found, probes={**found.probes, **named_probes(options)})
    return Sources(target=options["target"], draft=options["draft"], probes=named_probes(options))


def check_naming(options: dict[str, Any]) -> None:
    """Raise ConfigError when the options name models twice, or a draft alone."""
    if options["target"] is None and options["draft"] is None:
        return
    if options["pair"] is not None:
        raise ConfigError("--pair and -m/-md both name models; give one of them")
    if options["target"] is None:
        raise ConfigError("-md names a draft, but no target is given; add -m TARGET.gguf")


def named_probes(options: dict[str, Any]) -> dict[ProbeRole, Path]:
    """The probes that the options name, by role."""
    return {role: options[f"{role}_probe"] for role in PROBE_ROLES if options[f"{role}_probe"]}


def calibrated(config: RunConfig, sources: Sources, alpha: float | None) -> RunConfig:
    """`config` with the threshold that `probe calibrate` found for errors of at most `alpha`; as it is for None."""
    if alpha is None:
        return config
    from ..probes import read_probe_file

    if config.threshold is not None:
        raise ConfigError("--max-accept-error chooses the threshold; leave out --threshold")
    role: ProbeRole = "joint" if "joint_semantic_prob" in make_policy(config.policy).needs else "target"
    path = sources.probes.get(role)
    known = read_probe_file(path).spec.calibrations if path is not None else ()
    of_policy = {float(one["alpha"]): one["threshold"] for one in known if one["policy"] == config.policy}
    kept = [a for a in of_policy if a <= alpha and of_policy[a] is not None]
    if not kept:
        have = ", ".join(f"{a:g}" for a in sorted(of_policy)) or "none"
        raise ConfigError(
            f"--max-accept-error is {alpha:g}; the probe holds thresholds of {config.policy} for: {have}. "
            "Make one with semspec-local probe calibrate"
        )
    return replace(config, threshold=float(of_policy[max(kept)]))


def _fold_ratio_floor(options: dict[str, Any]) -> None:
    floor = options.pop("min_acceptance_ratio")
    if floor is None:
        return
    if options["threshold"] is not None:
        raise ConfigError("--min-acceptance-ratio and --threshold are one number; give one of them")
    policy = make_policy(options["policy"])
    if "target_semantic_prob" not in policy.needs:
        raise ConfigError(f"--min-acceptance-ratio is for the semantic policies; {policy.name} has no ratio floor")
    options["threshold"] = floor


def set_verbosity(quiet: bool, verbose: int) -> None:
    """How much the library says on standard error."""
    levels = {0: logging.WARNING, 1: logging.INFO}
    level = logging.ERROR if quiet else levels.get(verbose, logging.DEBUG)
    logging.getLogger("semspec_local").setLevel(level)
    if verbose < 2:  # llama.cpp warns about much that is normal
        logging.getLogger("semspec_local.llama.logs").setLevel(logging.ERROR)
