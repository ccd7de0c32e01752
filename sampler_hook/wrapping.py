"""Put wrappers on methods of vLLM, and take them off again so that its own are back."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sampler_hook.adapters import Target

OURS = "__sparseety__"  # on a wrapper

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Tap:
    """What is done around a method. Each gets what `find` makes of the instance; None from it: nothing is done."""

    find: Callable[[Any], Any]
    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], object] | None = None
    after: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], object] | None = None
    failed: Callable[[Any, BaseException], object] | None = None


@dataclass(slots=True, eq=False)
class Site:
    """A method with its wrapper."""

    target: Target
    own: Any  # vLLM's attribute
    ours: Any = None
    fired: bool = False

    @property
    def attached(self) -> bool:
        return vars(self.target.owner).get(self.target.name) is self.ours


def attach(target: Target, tap: Tap, safely: Callable[..., None]) -> Site:
    """Wrap a method. The wrapper calls vLLM's own with what it got, and `safely(site, action, ...)` for our part."""
    own = vars(target.owner)[target.name]
    site = Site(target, own)
    is_class_method = isinstance(own, classmethod)
    wrapper: Any = _wrapper(own.__func__ if is_class_method else own, site, tap, safely)
    setattr(wrapper, OURS, True)
    site.ours = classmethod(wrapper) if is_class_method else wrapper
    setattr(target.owner, target.name, site.ours)
    return site


def detach(site: Site) -> None:
    """Give vLLM its own method back. One that someone else has wrapped since stays; ours under it does nothing."""
    if site.attached:
        setattr(site.target.owner, site.target.name, site.own)


def _wrapper(own: Method, site: Site, tap: Tap, safely: Callable[..., None]) -> Method:
    find, before, after, failed = tap.find, tap.before, tap.after, tap.failed

    @functools.wraps(own)
    def wrapper(instance: Any, *args: Any, **kwargs: Any) -> Any:
        site.fired = True
        found = find(instance)
        if found is None:
            return own(instance, *args, **kwargs)
        if before is not None:
            safely(site, before, found, args, kwargs)
        try:
            result = own(instance, *args, **kwargs)
        except BaseException as error:
            if failed is not None:
                safely(site, failed, found, error)
            raise
        if after is not None:
            safely(site, after, found, result, args, kwargs)
        return result

    return wrapper


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
