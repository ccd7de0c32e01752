"""The plugin inside vLLM: writes down which tokens the scheduler accepted, and stays out of the way.

Importing this loads neither vLLM nor torch.
"""

import multiprocessing
import os

from sampler_hook import worker
from sampler_hook.hook import install, log
from sampler_hook.settings import HookSettings
from sampler_hook.sparsity_settings import SparsitySettings
from sparseety.errors import SparseetyError

_registered = False  # a forked child inherits it together with the wrappers


def register() -> None:
    """vLLM plugin entry point: called in each of its processes, perhaps more than once. Never raises."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        if settings := HookSettings.from_env(os.environ):  # None: capture was not asked for
            install(settings)
            _count_sparsity(settings)
    except SparseetyError as error:
        # Every process of a server meets the same fault; the one that the user started says it.
        if multiprocessing.parent_process() is None:
            log.error("sparseety: %s; vLLM serves, nothing is captured", error)
    except Exception:  # noqa: BLE001 -- the one boundary where anything may arrive
        log.exception("sparseety: the plugin could not be set up; vLLM serves, nothing is captured")


def _count_sparsity(settings: HookSettings) -> None:
    """The other part, off until asked for: where it cannot be had, tokens are recorded all the same."""
    try:
        if sparsity := SparsitySettings.from_env(os.environ):
            worker.install(settings, sparsity, os.environ)
    except SparseetyError as error:
        if multiprocessing.parent_process() is None:
            log.error("sparseety: %s; tokens are recorded, sparsity is not", error)
    except Exception:  # noqa: BLE001 -- as above
        log.exception("sparseety: counting sparsity could not be set up; tokens are recorded")
