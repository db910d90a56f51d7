"""What a GPU will be given next, made in another thread while it computes."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
AHEAD = 2  # updates that are made while the GPU computes one


def made_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield what an iterator does, which runs in another thread, `AHEAD` items before they are asked for.

    An error is raised where its item would have come. Closed, it asks for no more, and waits for nothing that is made.
    """
    end, thread = cast(Any, object()), ThreadPoolExecutor(1)
    coming = deque(thread.submit(next, items, end) for _ in range(AHEAD))
    try:
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
