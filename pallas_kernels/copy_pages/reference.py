"""The meaning of `copy_pages`, in plain XLA: a gather and a scatter of pages."""

from __future__ import annotations


def copy_pages(k_pages, v_pages, sources, targets):
    def copy(pages):
        return pages.at[targets].set(pages.at[sources].get(mode="promise_in_bounds"), mode="promise_in_bounds")

    return copy(k_pages), copy(v_pages)
