"""The prefix index: a radix tree over token ids whose nodes hold blocks.

An edge is labelled with the tokens of one block, so a node is a block of every layer group; a leaf
may have fewer tokens. Two prompts share the nodes of all blocks that they have in common. A prompt
that leaves an edge in its middle shares that block too, up to the token where it leaves, and gets a
copy when it writes (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024, whose RadixAttention this is, on blocks instead of single tokens).

Labels are compared token by token, never by a hash alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..core.allocator import BlockGroup

Key = tuple[str, str]  # the model's identity, the extra key
Label = tuple[int, ...]


class Node:
    """The tokens of one block behind those of its parent.

    Attributes:
        label: its tokens; fewer than a block's only in a leaf.
        blocks: for each layer group the block that holds their K/V, -1 where a window let it go.
    """

    __slots__ = ("blocks", "children", "label", "parent")

    def __init__(self, label: Label, blocks: list[int], parent: Node | None):
        self.label, self.blocks, self.parent = label, blocks, parent
        self.children: dict[Label, Node] = {}


class _Eviction(NamedTuple):
    """What to evict.

    Attributes:
        freed: the blocks of each group that it frees.
        nodes: nodes to remove, children before their parents.
        blocks: nodes that stay, each with the groups whose block they lose.
    """

    freed: list[int]
    nodes: dict[Node, None]
    blocks: list[tuple[Node, list[int]]]


class PrefixIndex:
    """Trees of token ids, one a key, over the blocks of a pool. Its caller holds the pool's lock.

    Args:
        groups: the pool's layer groups.
        block_size: tokens in a block.
    """

    def __init__(self, groups: Sequence[BlockGroup], block_size: int):
        self.groups, self.block_size = groups, block_size
        self.hits = self.misses = self.matched_tokens = 0
        self._roots: dict[Key, Node] = {}
        # How many nodes hold a block: more than one if a cache was indexed under several keys.
        self._holds: list[Counter[int]] = [Counter() for _ in groups]
        # All nodes but the roots, the least recently used first. A path is used from its end to
        # its beginning, so a child always comes before its parent.
        self._order: OrderedDict[Node, None] = OrderedDict()

    def match(self, key: Key, tokens: Sequence[int]) -> tuple[int, list[np.ndarray]]:
        """The longest known prefix of `tokens`.

        Returns:
            Its length in tokens, and for each group the blocks that hold it (int32, -1 where a
            window let them go). The last block may hold tokens behind the prefix.
        """
        path, length = self._walk(key, tokens)
        self._use(path)
        return length, [
            np.array([node.blocks[group] for node in path], np.int32)
            for group in range(len(self.groups))
        ]

    def note_use(self, lengths: np.ndarray) -> None:
        """Count prompts of which so many tokens (int64 [prompts]) need not be computed."""
        self.matched_tokens += int(lengths.sum())
        self.hits += int(np.count_nonzero(lengths))
        self.misses += int(np.count_nonzero(lengths == 0))

    def insert(self, key: Key, tokens: Sequence[int], tables: Sequence[np.ndarray]) -> int:
        """Index `tokens`, whose K/V are in the blocks of `tables` (a row's table of each group).

        Where a node already has a block for the same tokens, the table is redirected to it.

        Returns:
            How many of the tokens were not known before.
        """
        if not tokens:
            return 0
        node = self._roots.setdefault(key, Node((), [], None))
        path, known = [], 0
        for index, label in enumerate(self._labels(tokens)):
            child = node.children.get(label) or _child_beginning_with(node, label)
            if child is None:
                known += max((_common(label, other) for other in node.children), default=0)
                child = self._add(node, label, [int(table[index]) for table in tables])
            else:
                known += len(label)
                self._redirect(tables, index, child, is_whole=len(label) == len(child.label))
            path.append(child)
            node = child
        self._use(path)
        return len(tokens) - known

    def evictable(self) -> list[int]:
        """Blocks of each group that nothing but the index holds and that `evict` could free."""
        return self._plan(lambda freed: False).freed

    def evict(self, enough: Callable[[list[int]], bool]) -> int:
        """Drop what was used least recently and nothing else uses, until `enough(blocks freed)`.

        If that cannot be reached, nothing is dropped.

        Args:
            enough: takes how many blocks of each group would be free.

        Returns:
            How many blocks are free now that were not.
        """
        plan = self._plan(enough)
        if not enough(plan.freed):
            return 0
        for node in plan.nodes:
            self._remove(node)
        for node, groups in plan.blocks:
            self._let_go(node, groups)
        return sum(plan.freed)

    def clear(self) -> None:
        """Drop every node, whether a cache still uses its blocks or not."""
        for node in list(self._order):
            self._remove(node)
        self._roots.clear()

    def mend(self) -> None:
        """Make the order of use and the holds those of the tree, whatever was cut short."""
        self._roots = {key: root for key, root in self._roots.items() if root.children}
        last_use = {node: at for at, node in enumerate(self._order)}
        nodes = list(self._roots.values())
        depth: dict[Node | None, int] = {}
        for node in nodes:  # grows on the way: parents come before their children
            depth[node] = depth.get(node.parent, -1) + 1
            for child in node.children.values():
                child.parent = node
                nodes.append(child)
        used = {node: last_use.get(node, len(last_use)) for node in nodes}
        for node in reversed(nodes):
            if node.parent is not None:
                used[node.parent] = max(used[node.parent], used[node])
        nodes = [node for node in nodes if depth[node]]
        nodes.sort(key=lambda node: (used[node], -depth[node]))
        holds: list[Counter[int]] = [
            Counter(node.blocks[group] for node in nodes if node.blocks[group] >= 0)
            for group in range(len(self.groups))
        ]
        order = OrderedDict.fromkeys(nodes)
        self._order, self._holds = order, holds

    def held(self, group: int) -> np.ndarray:
        """int64, the blocks of a group that the index holds."""
        blocks = np.array([node.blocks[group] for node in self._order], np.int64)
        return blocks[blocks >= 0]

    def paths(self) -> Iterator[tuple[Key, list[Node]]]:
        """The path to each leaf with its key, the least recently used leaf first."""
        keys = {id(root): key for key, root in self._roots.items()}
        for leaf in self._order:
            if not leaf.children:
                path, node = [], leaf
                while node.parent is not None:
                    path.append(node)
                    node = node.parent
                yield keys[id(node)], path[::-1]

    def check(self) -> None:
        """Raise AssertionError where the tree is not what `match` and `evict` rely on."""
        seen: set[Node] = set()
        for node in self._order:
            parent = node.parent
            assert parent is not None, "a removed node is in the order of use"
            assert parent.children.get(node.label) is node, "a node is not its parent's child"
            assert all(child in seen for child in node.children.values()), "used before its child"
            assert 0 < len(node.label) <= self.block_size, "a label is empty or longer than a block"
            assert not node.children or len(node.label) == self.block_size, (
                "an inner label is too short"
            )
            seen.add(node)
        reachable, nodes = 0, list(self._roots.values())
        while nodes:
            children = nodes.pop().children.values()
            reachable += len(children)
            nodes.extend(children)
        assert reachable == len(seen), "a node of the tree is not in the order of use"

    def _labels(self, tokens: Sequence[int]) -> list[Label]:
        return [
            tuple(tokens[at : at + self.block_size])
            for at in range(0, len(tokens), self.block_size)
        ]

    def _walk(self, key: Key, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes that hold the longest known prefix of `tokens`, and its length."""
        path: list[Node] = []
        node, length = self._roots.get(key), 0
        for label in self._labels(tokens):
            if node is None:
                break
            child = node.children.get(label)
            if child is None:
                common, _, child = max(
                    (
                        (_common(label, other.label), sum(b >= 0 for b in other.blocks), other)
                        for other in node.children.values()
                    ),
                    key=lambda found: found[:2],
                    default=(0, 0, None),
                )
                if child is not None and common:
                    path.append(child)
                    length += common
                break
            path.append(child)
            length += len(label)
            node = child
        return path, length

    def _add(self, parent: Node, label: Label, blocks: list[int]) -> Node:
        """A node for `label`; a leaf with the first of these tokens grows into it, unless it has a
        block that the window of the longer one has let go."""
        for child in parent.children.values():
            loses = any(old >= 0 > new for old, new in zip(child.blocks, blocks, strict=True))
            if label[: len(child.label)] == child.label and not loses:
                del parent.children[child.label]
                self._let_go(child, range(len(blocks)))
                child.label, child.blocks = label, blocks
                break
        else:
            child = Node(label, blocks, parent)
            self._order[child] = None
        parent.children[label] = child
        for group, block in enumerate(blocks):
            if block >= 0:
                self._hold(group, block)
        return child

    def _redirect(
        self, tables: Sequence[np.ndarray], index: int, node: Node, is_whole: bool
    ) -> None:
        """Let a row's tables use the node's blocks; where it has none it gets the row's, unless
        the row has not all of its tokens."""
        for at, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            mine, known = int(table[index]), node.blocks[at]
            if mine < 0 or mine == known:
                continue
            if known < 0:
                if is_whole:
                    node.blocks[at] = mine
                    self._hold(at, mine)
            else:
                table[index] = known
                group.incref(np.array([known]))
                group.decref(np.array([mine]))

    def _use(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self._order.move_to_end(node)

    def _plan(self, enough: Callable[[list[int]], bool]) -> _Eviction:
        """First whole nodes, once their children have gone. If those are too few, nodes that a
        cache builds on lose the blocks of groups whose window has left them behind."""
        plan = _Eviction([0] * len(self.groups), {}, [])
        dropped: Counter[tuple[int, int]] = Counter()

        def drop(node: Node, groups: list[int]) -> None:
            for group in groups:
                block = node.blocks[group]
                dropped[group, block] += 1
                plan.freed[group] += dropped[group, block] == self._holds[group][block]

        for node in self._order:
            if enough(plan.freed):
                return plan
            unused = self._unused(node)
            if len(unused) == sum(block >= 0 for block in node.blocks) and all(
                child in plan.nodes for child in node.children.values()
            ):
                plan.nodes[node] = None
                drop(node, unused)
        for node in self._order:
            if enough(plan.freed):
                break
            if node not in plan.nodes:
                left = [g for g in self._unused(node) if self.groups[g].window is not None]
                plan.blocks.append((node, left))
                drop(node, left)
        return plan

    def _unused(self, node: Node) -> list[int]:
        """The groups whose block of the node nothing but the index holds."""
        return [
            index
            for index, (group, block) in enumerate(zip(self.groups, node.blocks, strict=True))
            if block >= 0 and group.ref_counts[block] == self._holds[index][block]
        ]

    def _hold(self, group: int, block: int) -> None:
        self.groups[group].incref(np.array([block]))
        self._holds[group][block] += 1

    def _let_go(self, node: Node, groups: Iterable[int]) -> None:
        for group in groups:
            block = node.blocks[group]
            if block >= 0:
                self.groups[group].decref(np.array([block]))
                self._holds[group][block] -= 1
                node.blocks[group] = -1

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        parent = node.parent
        del parent.children[node.label], self._order[node]
        if parent.parent is None and not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
        node.parent = None
        self._let_go(node, range(len(node.blocks)))


def longest_readable(
    length: int, blocks: Sequence[np.ndarray], groups: Sequence[BlockGroup], block_size: int
) -> int:
    """The most of the first `length` tokens behind which every group's window is held.

    Args:
        length: tokens that the blocks hold.
        blocks: as `PrefixIndex.match` returns them.
    """
    while length > 0:
        last = -(-length // block_size)
        for group, held in zip(groups, blocks, strict=True):
            first = 0 if group.window is None else max(length - group.window + 1, 0) // block_size
            if (held[first:last] < 0).any():
                break
        else:
            return length
        # Of the tokens in one block the last needs the fewest blocks in front of it.
        length = (last - 1) * block_size
    return 0


def _common(a: Label, b: Label) -> int:
    for at, (mine, other) in enumerate(zip(a, b, strict=False)):
        if mine != other:
            return at
    return min(len(a), len(b))


def _child_beginning_with(node: Node, label: Label) -> Node | None:
    for child in node.children.values():
        if child.label[: len(label)] == label:
            return child
    return None
