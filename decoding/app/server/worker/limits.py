"""Bounds on the connections, the time and the memory that clients of a server may take.

Other modules read them as `limits.NAME`, so that tests can shorten them.
"""

CHECK_S = 0.5  # between two checks of all connections

# Connections, in addition to the requests that --queue lets wait
CONNECTIONS = 256  # in all; twice as many for a moment
CLIENT_CONNECTIONS = 128  # from one IP address
NEW_S = 0.1  # seconds in which a connection is not closed for others
BACKLOG = 256  # that the kernel may hold for the server, and the server accepts at once
OTHER_FILES = 128  # open files of the process that are no connections

# A connection, in seconds
IDLE_S = 10  # it stays open between two requests
HEAD_S = 15.0  # until a request's head is complete, since it was opened or the last reply
STALL_S = 60.0  # its client may read nothing of what is sent
LINGER_S = 2.0  # it stays open after an error, so that its client can read that
PING_S = 1  # between two comments in a stream, which find out that its client is gone

# The head of a request
HEAD_BYTES = 32 * 1024

# The body of a request; --max-body bounds its size
BODY_S = 10.0  # seconds until it is complete, and longer by its size at BODY_RATE
BODY_RATE = 100e3  # bytes per second
CHUNKS = 1000  # at most, in addition to one for each CHUNK_BYTES: to parse one takes time
CHUNK_BYTES = 128
DRAIN_S = 10.0  # seconds in which the rest is discarded of a body that is refused
DRAIN_IDLE_S = 1.0  # of these, seconds in which nothing may come

# All bodies together
BODIES = 4  # times --max-body: bytes that are in memory
SMALL_BODY = 64 * 1024  # bytes; a body that is no larger does not wait for that memory
MEMORY_S = 15.0  # seconds that a larger one waits for it
SLOW_RATE = 1e6  # bytes per second; while one waits, those that come more slowly are refused
SLOW_S = 0.5  # over which that rate is measured, at least
PARSED_AT_ONCE = 2  # that are parsed and tokenized

# What they stand for
EXTRA_VALUES = 100_000  # JSON values of a body, in addition to one for each token of the context

MESSAGES = 10_000
STOPS, STOP_CHARACTERS = 16, 500

# An answer
UNREAD_EVENTS = 10_000  # parts of it that wait for its client to read them
