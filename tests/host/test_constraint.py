import numpy as np
import pytest

from jpaged.host.constraint import Constraint, mask_of

VOCAB = 70


def ids(constraint, token_ids=(), ahead=False):
    mask = np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32)
    constraint.fill(mask, list(token_ids), ahead)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_mask_has_the_bits_of_its_ids_and_none_behind_the_vocabulary():
    assert mask_of([0, 31, 32, 69], VOCAB).tolist() == [1 | 1 << 31, 1, 1 << 5]
    assert ids(Constraint(VOCAB)) == list(range(VOCAB))


def test_only_allowed_ids_are_left():
    assert ids(Constraint(VOCAB, allowed=[3, 69, 3])) == [3, 69]


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {9}),
        ([4], {9, 5}),
        ([4, 5], {9}),
        ([4, 5, 6], {9, 7}),  # 5, 6, 7
        ([1, 4], {9, 5}),
        ([5, 6], {9, 7}),
        ([6, 5], {9}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(output, banned):
    constraint = Constraint(VOCAB, bad_words=[[9], [4, 5], [5, 6, 7]])
    assert set(range(VOCAB)) - set(ids(constraint, output)) == banned


def test_ids_that_end_the_text_wait_for_min_tokens():
    constraint = Constraint(VOCAB, allowed=[1, 2, 3], ending_ids=frozenset({2}), min_tokens=2)
    assert ids(constraint) == ids(constraint, [1]) == [1, 3]
    assert ids(constraint, [1], ahead=True) == ids(constraint, [1, 1]) == [1, 2, 3]


def test_what_would_leave_nothing_gives_way():
    assert ids(Constraint(VOCAB, allowed=[2], ending_ids=frozenset({2}), min_tokens=5)) == [2]
    assert ids(Constraint(VOCAB, allowed=[9], bad_words=[[9]])) == [9]


class Odd:
    """Allows odd ids that no earlier token has."""

    def __init__(self):
        self.tokens = []

    def follow(self, token_ids):
        self.tokens = list(token_ids)

    def fill(self, mask):
        mask[:] = mask_of([i for i in range(1, VOCAB, 2) if i not in self.tokens], VOCAB)
        mask[-1] |= 1 << 31  # behind the vocabulary

    def fork(self):
        copy = Odd()
        copy.tokens = list(self.tokens)
        return copy


def test_a_matcher_sees_all_tokens_and_its_mask_is_cut_to_the_vocabulary():
    constraint = Constraint(VOCAB, matcher=Odd(), bad_words=[[5]])
    assert ids(constraint, [1, 3]) == [i for i in range(7, VOCAB, 2)]
    fork = constraint.fork()
    assert ids(fork, [1]) == [3, *range(7, VOCAB, 2)]
    assert constraint._matcher.tokens == [1, 3] and fork._matcher.tokens == [1]


def test_ahead_of_a_token_that_matters_there_is_no_mask():
    with pytest.raises(AssertionError, match="not known"):
        ids(Constraint(VOCAB, bad_words=[[1]]), ahead=True)
