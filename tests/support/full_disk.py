"""A disk without room."""

import resource


class FileTooLarge:
    """Every file that is written ends at a size, as it does at the end of a disk."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
