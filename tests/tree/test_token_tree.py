"""The trie: whatever goes in comes out along its path, and each different beginning is held
once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.tree.token_tree import TokenTree

# few different tokens, so that sequences share beginnings, equal and contain one another
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def path_to(tree: TokenTree, read: int) -> list[int]:
    """The tokens from the root to a flat index, along the parents."""
    at = next(segment for segment in tree.segments if segment.start <= read < segment.end)
    tokens = tree.tokens_N[at.start : read + 1].tolist()
    while at.parent is not None:
        at = tree.segments[at.parent]
        tokens = tree.tokens_N[at.start : at.end].tolist() + tokens
    return tokens


@given(
    SEQUENCES
    | st.lists(
        st.lists(st.sampled_from([0, 255, 256, 2**31, 2**32, 2**63 - 1]), min_size=1), min_size=1
    )
)
@settings(deadline=None)
def test_every_path_is_its_sequence_and_every_beginning_is_held_once(
    sequences: list[list[int]],
) -> None:
    tree = TokenTree.from_sequences(sequences)
    assert [path_to(tree, int(read)) for read in tree.ends_S] == sequences
    beginnings = set()
    for sequence in sequences:
        beginnings |= {tuple(sequence[: n + 1]) for n in range(len(sequence))}
    assert tree.num_tokens == len(beginnings)
    assert tree.depth == max(map(len, sequences))


@given(SEQUENCES)
@settings(deadline=None)
def test_segments_tile_the_row_and_subtrees_are_ranges(sequences: list[list[int]]) -> None:
    tree = TokenTree.from_sequences(sequences)
    starts = [segment.start for segment in tree.segments]
    ends = [segment.end for segment in tree.segments]
    assert [*starts, tree.num_tokens] == [0, *ends]
    for index, segment in enumerate(tree.segments):
        assert len(segment) > 0
        assert tree.positions_N[segment.start : segment.end].tolist() == list(
            range(segment.depth, segment.depth + len(segment))
        )
        if segment.parent is not None:
            parent = tree.segments[segment.parent]
            assert segment.parent < index and segment.depth == parent.depth + len(parent)
            assert parent.end <= segment.start < segment.subtree_end <= parent.subtree_end
        below = set()
        for other, candidate in enumerate(tree.segments):
            if candidate.parent == index or candidate.parent in below:
                below.add(other)
        tokens = set()
        for i in below:
            tokens |= set(range(tree.segments[i].start, tree.segments[i].end))
        assert tokens == set(range(segment.end, segment.subtree_end))


@given(SEQUENCES, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_sequences_changes_only_the_order_of_the_reads(
    sequences: list[list[int]], random
) -> None:
    order = list(range(len(sequences)))
    random.shuffle(order)
    one, other = map(TokenTree.from_sequences, (sequences, [sequences[i] for i in order]))
    assert one.tokens_N.tolist() == other.tokens_N.tolist() and one.segments == other.segments
    assert one.ends_S[order].tolist() == other.ends_S.tolist()
