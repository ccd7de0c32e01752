"""vLLM's callback for chosen experts, on stand-ins that keep it as vLLM 0.28 and 0.32 do."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sampler_hook.choices import Tap, captured_by_vllm, place
from sampler_hook.sites import find


class Buffer:
    """[row, layer] of choices."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Any]] = {}

    def __getitem__(self, index: tuple[Any, int]) -> Any:
        return self.layers.setdefault(index[1], [])


class Capturer:
    """Keeps the choices of one of two engines' rows."""

    def __init__(self) -> None:
        self.device_buffer = Buffer()

    def capture(self, layer: int, choices: Any) -> None:
        self.device_buffer[:, layer][:] = choices[:1]


def of_0_32(layer: int, capturer: Capturer) -> Callable[[Any], None]:
    return partial(capturer.capture, layer)


def of_0_28(layer: int, capturer: Capturer) -> Callable[[Any], None]:
    def capture_fn(choices: Any, layer_id: int = layer, capturer: Capturer = capturer) -> None:
        capturer.capture(layer_id, choices)

    return capture_fn


def experts(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(router=SimpleNamespace(capture_fn=None, top_k=2), **attributes)


MONOLITHIC = SimpleNamespace(is_monolithic=True)


def test_the_callback_gets_every_choice_and_is_taken_off_again() -> None:
    layer, noted = experts(), []
    tap = Tap(layer, noted.append, batch=True)
    tap.put_on()
    tap.put_on()
    layer.router.capture_fn([[1, 2]])
    tap.take_off()
    assert noted == [[[1, 2]]]
    assert layer.router.capture_fn is None


@pytest.mark.parametrize("bind", [of_0_28, of_0_32])
def test_vllms_own_capture_goes_on_and_is_what_is_read(bind: Any) -> None:
    layer, capturer, noted = experts(), Capturer(), []
    tap = Tap(layer, lambda choices: noted.append(list(choices)), batch=False)
    tap.put_on()
    assert layer.router.capture_fn is None  # its rows are of several engines, and nobody says which are ours
    theirs = bind(3, capturer)
    layer.router.capture_fn = theirs
    tap.put_on()
    layer.router.capture_fn(["ours", "another engine's"])
    assert noted == [["ours"]]
    assert capturer.device_buffer.layers == {3: ["ours"]}
    tap.take_off()
    assert layer.router.capture_fn is theirs


def test_a_callback_of_a_third_party_is_called_and_not_mistaken_for_vllms() -> None:
    layer, theirs, noted = experts(), [], []
    layer.router.capture_fn = theirs.append
    assert captured_by_vllm(theirs.append) is None
    tap = Tap(layer, noted.append, batch=True)
    tap.put_on()
    layer.router.capture_fn([[1, 2]])
    assert theirs == noted == [[[1, 2]]]


def test_a_callback_put_on_after_ours_is_left_where_it_is() -> None:
    layer = experts()
    tap = Tap(layer, lambda choices: None, batch=True)
    tap.put_on()
    layer.router.capture_fn = theirs = print
    tap.take_off()
    assert layer.router.capture_fn is theirs


def test_a_kernel_that_routes_by_itself_tells_its_choices_only_where_vllm_captures_them() -> None:
    assert place(experts(_quant_method=MONOLITHIC)) is None
    sink = SimpleNamespace(capture_fn=print)
    assert place(experts(_quant_method=MONOLITHIC, routed_experts=SimpleNamespace(routing_sink=sink))) is sink


GATE = SimpleNamespace(output_size=8, e_score_correction_bias=object())


def routers(layer: SimpleNamespace, **options: Any) -> tuple[list[tuple[str, bool]], dict[str, str]]:
    modules = {"layers.0.mlp": SimpleNamespace(experts=layer), "layers.0.mlp.gate": GATE}
    found = find(SimpleNamespace(named_modules=modules.items), **options)
    return [(router.name, router.by_callback) for router, _ in found.routers], found.not_observed


def test_a_router_that_adds_a_bias_is_read_by_its_callback_where_it_has_one() -> None:
    assert routers(experts())[0] == [("layers.0.mlp.gate", True)]


def test_where_nothing_can_be_read_it_says_not_observed_and_why() -> None:
    found, reasons = routers(experts(_quant_method=MONOLITHIC))
    assert found == []
    assert reasons["layers.0.mlp.gate"] == "its choice is not the top-k of its logits (e_score_correction_bias)"
    found, reasons = routers(experts(), mixed="rows of others")
    assert found == []
    assert "rows of others" in reasons["layers.0.mlp.gate"]
    assert routers(experts(_quant_method=MONOLITHIC), captured=True)[0] == [("layers.0.mlp.gate", True)]
