"""Counting inside the model: an operator per site that writes into a buffer on the model's device, and the sums of it.

Nothing here waits for the device. The operators are opaque to torch.compile and touch only tensors made once, so a CUDA
graph that has captured them replays them. A buffer is filled with -1 before each step: what no operator wrote, because
its module did not run or a compiled graph lacks it, is "not observed" and never 0.

torch is imported where it is used; its objects are Any, for it is not there where this is type-checked.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from sampler_hook.ledger import Slot
from sparseety.clock import Clock
from sparseety.records import AnyRecord, Experts, Router, Site, Sparsity

UNWRITTEN = -1

# Who counts, by the number that an operator is called with, and the threshold of near zero. A number is part of a
# compiled graph, what it stands for is not: the operators of one that is not in here return at once.
live: dict[int, float] = {}
_library: list[Any] = []  # torch forgets operators whose library is collected
_faults: list[Exception] = []  # of the operators, which may not raise inside a forward pass


def operators() -> Any:
    """The namespace torch.ops.sparseety, its operators defined in this process."""
    import torch

    if not _library:
        library = torch.library.Library("sparseety", "DEF")
        for name, schema, implementation in (
            ("count_activations", "(Tensor values, int number, Tensor(a!) out) -> ()", _count_activations),
            ("note_experts", "(Tensor logits, int number, Tensor(a!) out) -> ()", _note_experts),
            ("note_choices", "(Tensor experts, int number, Tensor(a!) out) -> ()", _note_choices),
        ):
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(name, _never_raising(implementation), "CompositeExplicitAutograd")
            torch.library.register_fake(f"sparseety::{name}", lambda *_: None, lib=library)
        _library.append(library)
    return torch.ops.sparseety


def take_fault() -> Exception | None:
    """What an operator ran into since this was last called."""
    fault = _faults[-1] if _faults else None
    _faults.clear()
    return fault


def _never_raising(body: Callable[..., None]) -> Callable[..., None]:
    def guarded(values: Any, number: int, out: Any) -> None:
        if number not in live:
            return  # of a compiled graph, which keeps them when counting has ended
        try:
            body(values, number, out)
        except Exception as error:  # noqa: BLE001 -- inside a forward pass: the reply comes first
            if not _faults:
                _faults.append(error)

    return guarded


def _count_activations(values: Any, number: int, out: Any) -> None:
    """Per row: elements that are not zero, and those that are not near zero."""
    import torch

    near = live[number]
    flat = values.reshape(-1, values.shape[-1])[: out.shape[0]]
    rows = out[: flat.shape[0]]
    # Comparing 16-bit floats is an order of magnitude slower on a CPU than turning them into booleans.
    torch.sum(flat.bool().view(torch.int8), 1, dtype=torch.int32, out=rows[:, 0])
    if near > 0:
        flat = torch.nn.functional.hardshrink(flat, _representable(near, flat.dtype))  # NaN stays as it is
        torch.sum(flat.bool().view(torch.int8), 1, dtype=torch.int32, out=rows[:, 1])
    else:
        rows[:, 1] = rows[:, 0]


@functools.lru_cache
def _representable(threshold: float, dtype: Any) -> float:
    """The greatest number of this type that is not above the threshold: torch would round it up, too."""
    import torch

    rounded = torch.tensor(threshold, dtype=dtype)
    if float(rounded) > threshold:
        rounded = torch.nextafter(rounded, torch.zeros((), dtype=dtype))
    return float(rounded)


def _note_experts(logits: Any, number: int, out: Any) -> None:
    """Per row: the top-k of a plain router; softmax and sigmoid keep the order of the logits."""
    flat = logits.reshape(-1, logits.shape[-1])[: out.shape[0]]
    out[: flat.shape[0]] = flat.topk(out.shape[1], dim=-1).indices


def _note_choices(experts: Any, number: int, out: Any) -> None:
    """Per row: the experts as the router itself chose them."""
    flat = experts.reshape(-1, experts.shape[-1])[: out.shape[0], : out.shape[1]]
    out[: flat.shape[0], : flat.shape[1]] = flat


# --------------------------------------------------------------------------------------------------- the buffers


@dataclass(slots=True)
class _Waiting:
    """Records that are on their way from the device."""

    tensors: list[Any]  # on the host, or arriving there
    arrived: Any  # a CUDA event; None: they are there
    make: Callable[[list[Any]], list[AnyRecord]]


@dataclass(slots=True)
class Counters:
    """The buffers of one model, and the sums over them by slot (ledger.py)."""

    sites: list[Site]
    routers: list[Router]
    rows: int  # tokens of a step, at most
    device: Any
    clock: Clock
    per_token: bool = False
    written_sites: set[int] = field(default_factory=set)  # seen written at least once
    written_routers: set[int] = field(default_factory=set)
    _site_buffers: list[Any] = field(default_factory=list)
    _router_buffers: list[Any] = field(default_factory=list)
    _site_sums: Any = None  # [slots, sites, 3]: not zero, not near zero, tokens observed
    _router_sums: Any = None  # [slots, routers, experts + 1]: tokens by expert; last: choices not observed
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def __post_init__(self) -> None:
        import torch

        def buffer(columns: int) -> Any:
            return torch.full((self.rows, columns), UNWRITTEN, dtype=torch.int32, device=self.device)

        # One allocation each: of buffers that share memory, functionalization would copy them all for each write.
        self._site_buffers = [buffer(2) for _ in self.sites]
        self._router_buffers = [buffer(router.top_k) for router in self.routers]

    @property
    def buffers(self) -> tuple[list[Any], list[Any]]:
        """What the operators write into: of the sites, of the routers."""
        return self._site_buffers, self._router_buffers

    def before_step(self, rows: int) -> None:
        for buffer in (*self._site_buffers, *self._router_buffers):
            buffer[:rows].fill_(UNWRITTEN)

    def add(self, slots: list[int], capacity: int, kept: list[int] | None = None) -> None:
        """Add a step's rows to the sums of their slots, in stream order after the step itself. `kept`: which rows of
        the batch these are; None: the first ones."""
        import torch

        self._grow(capacity)
        index = self._on_device(slots)
        which = self._which(len(slots), kept)
        if self.sites:
            seen = torch.stack([buffer[which] for buffer in self._site_buffers], 1)
            observed = seen[:, :, :1] > UNWRITTEN
            self._site_sums.index_add_(0, index, torch.cat([seen.clamp(min=0), observed], 2).long())
        for number, buffer in enumerate(self._router_buffers):
            table, seen = self._router_sums[number], buffer[which].long()
            seen = torch.where(seen > UNWRITTEN, seen, table.shape[1] - 1)
            flat = (index[:, None] * table.shape[1] + seen).reshape(-1)
            table.view(-1).index_add_(0, flat, torch.ones_like(flat))

    def _which(self, rows: int, kept: list[int] | None) -> Any:
        return slice(rows) if kept is None else self._on_device(kept)

    def _on_device(self, numbers: list[int]) -> Any:
        import torch

        index = torch.tensor(numbers, dtype=torch.int64)
        return index if self.device.type == "cpu" else index.pin_memory().to(self.device, non_blocking=True)

    def _grow(self, capacity: int) -> None:
        import torch

        old = 0 if self._site_sums is None else self._site_sums.shape[0]
        if capacity <= old:
            return
        new = max(64, 2 * capacity)

        def grown(table: Any, *shape: int) -> Any:
            larger = torch.zeros((new, *shape), dtype=torch.int64, device=self.device)
            if table is not None:
                larger[:old] = table
            return larger

        self._site_sums = grown(self._site_sums, len(self.sites), 3)
        tables = self._router_sums or [None] * len(self.routers)
        self._router_sums = [
            grown(table, router.experts + 1) for table, router in zip(tables, self.routers, strict=True)
        ]

    # ----------------------------------------------------------------------------------------------- reading out

    def take(self, slots: list[Slot]) -> None:
        """Have the sums of these slots written down, and begin them anew."""
        if not slots:
            return
        index = self._on_device([slot.index for slot in slots])
        tables = [self._site_sums, *self._router_sums]
        self._send([table[index] for table in tables], lambda arrived: self._sums(slots, arrived))
        for table in tables:
            table[index] = 0

    def take_tokens(self, slots: list[Slot], kept: list[int] | None = None) -> None:
        """Have each row of the step written down; `slots` describe the step's segments, in row order."""
        import torch

        which = self._which(sum(slot.tokens for slot in slots), kept)
        tensors = [torch.stack([buffer[which] for buffer in self._site_buffers], 1)] if self.sites else []
        tensors += [buffer[which].clone() for buffer in self._router_buffers]
        self._send(tensors, lambda arrived: self._tokens(slots, arrived))

    def _send(self, tensors: list[Any], make: Callable[[list[Any]], list[AnyRecord]]) -> None:
        import torch

        if self.device.type == "cpu":
            self._waiting.append(_Waiting(tensors, None, make))
            return
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append(_Waiting(hosts, arrived, make))

    def ready(self, *, wait: bool = False) -> Iterator[AnyRecord]:
        """The records whose numbers have arrived, in order. `wait`: for all of them."""
        while self._waiting:
            first = self._waiting[0]
            if first.arrived is not None:
                if wait:
                    first.arrived.synchronize()
                elif not first.arrived.query():
                    return
            self._waiting.popleft()
            yield from first.make(first.tensors)

    def _sums(self, slots: list[Slot], tensors: list[Any]) -> list[AnyRecord]:
        sites, *routers = (tensor.tolist() for tensor in tensors)
        records: list[AnyRecord] = []
        for number, slot in enumerate(slots):
            if self.sites:
                records.append(self._sparsity(slot, sites[number]))
            if self.routers:
                records.append(self._experts(slot, [table[number] for table in routers]))
        return records

    def _sparsity(self, slot: Slot, sums: list[list[int]]) -> Sparsity:
        elements = [tokens * site.width for site, (_, _, tokens) in zip(self.sites, sums, strict=True)]
        self.written_sites.update(number for number, count in enumerate(elements) if count)
        return Sparsity(
            ts=self.clock(),
            engine_id=slot.engine_id,
            phase=slot.phase,
            tokens=slot.tokens,
            zeros=[count - sums[number][0] for number, count in enumerate(elements)],
            near=[count - sums[number][1] for number, count in enumerate(elements)],
            elements=elements,
            positions=slot.positions,
            drafts=slot.drafts,
            step=slot.step,
        )

    def _experts(self, slot: Slot, sums: list[list[int]]) -> Experts:
        missing = [row[-1] for row in sums]
        self.written_routers.update(number for number, row in enumerate(sums) if any(row[:-1]))
        return Experts(
            ts=self.clock(),
            engine_id=slot.engine_id,
            phase=slot.phase,
            tokens=slot.tokens,
            counts=[row[:-1] for row in sums],
            not_observed=missing if any(missing) else [],
            positions=slot.positions,
            drafts=slot.drafts,
            step=slot.step,
        )

    def _tokens(self, slots: list[Slot], tensors: list[Any]) -> list[AnyRecord]:
        seen = tensors[0].tolist() if self.sites else []  # [rows][sites][2]
        chosen = [tensor.tolist() for tensor in tensors[bool(self.sites) :]]  # [routers][rows][k]
        records: list[AnyRecord] = []
        first = 0
        for slot in slots:
            rows = slice(first, first + slot.tokens)
            first += slot.tokens
            if self.sites:
                records.append(self._token_sparsity(slot, seen[rows]))
            if self.routers:
                records.append(self._token_experts(slot, [table[rows] for table in chosen]))
        return records

    def _token_sparsity(self, slot: Slot, rows: list[list[list[int]]]) -> Sparsity:
        def zeros(column: int) -> list[list[int]]:
            return [
                [UNWRITTEN if row[number][0] == UNWRITTEN else site.width - row[number][column] for row in rows]
                for number, site in enumerate(self.sites)
            ]

        exact, near = zeros(0), zeros(1)
        sums = [
            [sum(row[number][0] for row in kept), sum(row[number][1] for row in kept), len(kept)]
            for number in range(len(self.sites))
            for kept in [[row for row in rows if row[number][0] != UNWRITTEN]]
        ]
        return replace(self._sparsity(slot, sums), token_zeros=exact, token_near=near)

    def _token_experts(self, slot: Slot, tables: list[list[list[int]]]) -> Experts:
        sums = []
        for router, table in zip(self.routers, tables, strict=True):
            counts = [0] * (router.experts + 1)
            for chosen in table:
                for expert in chosen:
                    counts[expert] += 1  # -1, not observed, is the last one
            sums.append(counts)
        return replace(self._experts(slot, sums), token_experts=tables)
