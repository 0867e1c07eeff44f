"""For a while: moved to gruppo.calls."""
from gruppo.calls import *  # noqa
from gruppo.calls import Call, Kind, Unanswered, abandoned_count, describe, start, wait_for, within  # noqa
