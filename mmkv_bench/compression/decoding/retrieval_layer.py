"""Cache layer whose dynamic heads fetch chunks from host memory at every step, for HybridKV."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.cache import CompressedLayer, Kernel
from mmkv_bench.compression.numerics.ordering import at_slots
from mmkv_bench.errors import UnsupportedError


class Pages:
    """All n entries of a layer's H dynamic heads as P chunks in host memory, and the chunks' mean keys on the device.

    An incomplete last chunk is padded with the mean of its tokens.

    Attributes:
        keys, values: ``[H * P, chunk * D]`` in host memory (pinned if the device is an accelerator), the model's dtype.
        means: ``[H, P, D]`` on the device, the model's dtype.
        length: n.
        chunk: tokens per chunk.
        slots: number of chunks that a head fetches per step.
        count: P.
        staging: two pinned ``[H * slots, chunk * D]`` buffers in which fetched chunks are gathered, so that a step
            copies to the device once for keys and once for values.
    """

    def __init__(self, key: Tensor, value: Tensor, chunk: int, slots: int):
        self.heads, self.length, _ = key.shape
        self.chunk, self.slots, self.count = chunk, slots, -(-self.length // chunk)
        keys = self._chunked(key)
        # Half-precision padding rounds the mean; the tokens themselves give an incomplete chunk's mean exactly.
        means = keys.float().mean(2)
        means[:, -1] = key[:, (self.count - 1) * chunk :].float().mean(1)
        self.means = means.to(key.dtype)
        device = devices.at(key.device)
        self.keys, self.values = (
            device.to_host(chunks.flatten(0, 1).flatten(1)) for chunks in (keys, self._chunked(value))
        )
        self.staging = [
            device.host_buffer(self.heads * slots, pages.shape[1], dtype=pages.dtype)
            for pages in (self.keys, self.values)
        ]

    def _chunked(self, entries: Tensor) -> Tensor:
        padded = entries.new_empty(self.heads, self.count * self.chunk, entries.shape[2])
        padded[:, : self.length] = entries
        last_mean = entries[:, (self.count - 1) * self.chunk :].float().mean(1, keepdim=True)
        padded[:, self.length :] = last_mean.to(entries.dtype)
        return padded.view(self.heads, self.count, self.chunk, -1)

    def best_chunks(self, query: Tensor, keep_last: bool) -> Tensor:
        """Return the chunks to fetch for each head, int64 ``[H, slots]``, ascending.

        The largest ``query . mean key`` win; of equal ones, the lower chunk.

        Args:
            query: float32 ``[H, D]``.
            keep_last: always fetch the last chunk, as one of the slots.
        """
        scores = torch.bmm(self.means.float(), query.unsqueeze(-1)).squeeze(-1)
        if keep_last:
            scores[:, -1] = float("inf")
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.slots].sort(dim=-1).values

    def copy_rows_to_host(self, chosen: Tensor) -> Tensor:
        """Start copying the row numbers of ``chosen`` chunks to the host; return the copy, int64 ``[H * slots]``.

        The copy may be read only after the device has finished its work so far. chosen: int64 ``[H, slots]``.
        """
        device = chosen.device
        rows = (torch.arange(self.heads, device=device)[:, None] * self.count + chosen).flatten()
        return devices.at(device).host_buffer(len(rows), dtype=rows.dtype).copy_(rows, non_blocking=True)

    def fetch(self, chosen: Tensor, width: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy chunks to the device.

        Args:
            chosen: int64 ``[H, slots]``, ascending.
            width: slots of the result; at least as many as the chosen chunks have tokens.
            rows: the result of `copy_rows_to_host` for these chunks; the device must have finished that copy.

        Returns:
            Keys and values ``[H, width, D]``, and token indices int64 ``[H, width]``, ascending. Padding is on the left
                and has the index -1.
        """
        device = chosen.device
        token = (chosen.unsqueeze(-1) * self.chunk + torch.arange(self.chunk, device=device)).flatten(1)
        token = torch.nn.functional.pad(token, (max(0, width - token.shape[1]), 0), value=-1)
        token = token.masked_fill(token >= self.length, -1)
        # All padding, the last chunk's too, goes to the left.
        order = token.argsort(dim=-1, stable=True)[:, token.shape[1] - width :]
        fetched = []
        for pages, buffer in zip((self.keys, self.values), self.staging, strict=True):
            torch.index_select(pages, 0, rows, out=buffer)
            # The next step first waits for its row numbers, so this copy has ended before the buffer is written again.
            entries = buffer.to(device, non_blocking=True).view(self.heads, self.slots * self.chunk, -1)
            entries = torch.nn.functional.pad(entries, (0, 0, token.shape[1] - entries.shape[1], 0))
            fetched.append(at_slots(entries, order))
        keys, values = fetched
        return keys, values, token.gather(1, order)

    @property
    def host_tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values, *self.staging)

    def host_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.host_tensors)

    def padding_nbytes(self) -> int:
        """Return the bytes of the padding in incomplete last chunks."""
        missing = self.count * self.chunk - self.length
        return self.heads * missing * (self.keys.nbytes + self.values.nbytes) // (self.heads * self.count * self.chunk)

    def moved_nbytes(self) -> int:
        """Return the bytes that a step copies to the device: the fetched chunks."""
        return sum(buffer.nbytes for buffer in self.staging)

    def read_nbytes(self) -> int:
        """Return the bytes that a step reads: all mean keys, and the fetched chunks."""
        return self.means.nbytes + self.moved_nbytes()


class RetrievalLayer(CompressedLayer):
    """One layer of one sequence: the static heads' entries, and a buffer that the dynamic heads refill at every step.

    The buffer of a dynamic head is the last ``width`` of the ``prefix`` slots before the appended tokens. A step is one
    forward pass. Its queries (one while decoding, all of a question or of a second turn) choose chunks once, by their
    mean, so that the device never has more entries than the budget. Appended tokens are visible as in other layers.
    """

    pages: Pages | None = None

    def offload(self, heads: Tensor, pages: Pages, width: int, origin: int, keep_last: bool) -> None:
        """Make ``heads`` (int64 ``[H]``) dynamic: from now on they fetch their entries from ``pages``.

        Args:
            pages: the entries of these heads.
            width: slots of a head's buffer.
            origin: logical index of the pages' first token.
            keep_last: see ``Pages.best_chunks``.
        """
        self.heads, self.pages, self.width = heads, pages, width
        self.origin, self.keep_last, self.prefix = origin, keep_last, self.stored
        self.ragged = self.ragged or bool(pages.length % pages.chunk)
        dynamic = set(heads.tolist())
        runs = groupby(range(self._key_storage.shape[1]), key=dynamic.__contains__)
        self.runs = [(kind, [*members]) for kind, members in runs]

    def attention(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run an attention kernel on the layer, see `CompressedLayer.attention`.

        If the device can overlap copies and computation, static heads attend while the dynamic heads' chunks are
        copied.
        """
        pages = self.pages
        stream = None if pages is None else devices.at(self.device).lane()
        if pages is None or stream is None:
            return super().attention(kernel, query, key, value, mask)
        with stream:
            chunks = self._choose_chunks(query, pages)
            rows = pages.copy_rows_to_host(chunks)
        output_by_head = self._attend_heads(False, kernel, query, key, value, mask)
        stream.settle()
        with stream:
            fetched = pages.fetch(chunks, self.width, rows)
        stream.join()
        self._fill_buffers(*fetched)
        output_by_head |= self._attend_heads(True, kernel, query, key, value, mask)
        outputs, weights = zip(*(output_by_head[first] for first in sorted(output_by_head)), strict=True)
        return torch.cat(outputs, 2), None if weights[0] is None else torch.cat(weights, 1)

    def _attend_heads(
        self, dynamic: bool, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Run attention with only the dynamic heads or only the static heads, without copying keys or values.

        Returns first head -> (output, attention weights or None), for each run of neighbouring heads of this kind.
        """
        visible, group = self.visible(query, mask), query.shape[1] // key.shape[1]
        outputs = {}
        for kind, heads in self.runs:
            if kind == dynamic:
                kv_heads, rows = slice(heads[0], heads[-1] + 1), slice(heads[0] * group, (heads[-1] + 1) * group)
                head_mask = visible if visible is None or visible.shape[1] == 1 else visible[:, kv_heads]
                outputs[heads[0]] = kernel(query[:, rows], key[:, kv_heads], value[:, kv_heads], head_mask)
        return outputs

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.pages is not None:
            self._refill(query, self.pages)
        return super().attend(query, key, value, mask)

    def _refill(self, query: Tensor, pages: Pages) -> None:
        assert devices.at(self.device).lane() is None, "its copies are waited for in `attention`"
        chunks = self._choose_chunks(query, pages)
        self._fill_buffers(*pages.fetch(chunks, self.width, pages.copy_rows_to_host(chunks)))

    def _choose_chunks(self, query: Tensor, pages: Pages) -> Tensor:
        """Return the chunks to fetch, int64 ``[H, slots]``, for the queries ``[1, Hq, n, D]`` of a step.

        They are chosen by the mean query over the n tokens and the query heads of each KV head.
        """
        mean = query[0].float().mean(1).view(self._key_storage.shape[1], -1, query.shape[-1]).mean(1)
        return pages.best_chunks(mean[self.heads], self.keep_last)

    def _fill_buffers(self, keys: Tensor, values: Tensor, token: Tensor) -> None:
        buffer = slice(self.prefix - self.width, self.prefix)
        self._key_storage[0, self.heads, buffer] = keys
        self._value_storage[0, self.heads, buffer] = values
        position = (token + self.origin).masked_fill(token < 0, -1)
        assert self._position_storage is not None, "a layer made of rows has positions"
        self._position_storage[0, self.heads, buffer] = position.to(self._position_storage.dtype)

    # ---- audit

    def reachable(self) -> Tensor:
        entries = self.entries()
        if self.pages is not None:
            entries[0, self.heads.cpu()] = self.pages.length + self.stored - self.prefix
        return entries

    def buffers(self) -> list[Tensor]:
        return super().buffers() + (
            [] if self.pages is None else [self.heads, self.pages.means, *self.pages.host_tensors]
        )

    def padding_nbytes(self) -> int:
        return super().padding_nbytes() + (0 if self.pages is None else self.pages.padding_nbytes())

    def read_nbytes(self, fed: int) -> int:
        return super().read_nbytes(fed) + (0 if self.pages is None else self.pages.read_nbytes())

    def moved_nbytes(self) -> int:
        return 0 if self.pages is None else self.pages.moved_nbytes()

    def nbytes(self) -> tuple[int, int]:
        data, metadata = super().nbytes()
        return data, metadata + (0 if self.pages is None else self.pages.means.nbytes)

    def host_nbytes(self) -> int:
        return 0 if self.pages is None else self.pages.host_nbytes()

    def _clear(self) -> None:
        super()._clear()
        self.pages = None

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        raise UnsupportedError("chunk retrieval holds one sequence; use greedy decoding, prompt by prompt")
