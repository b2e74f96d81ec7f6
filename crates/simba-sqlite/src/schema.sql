-- The tables of Simba in a SQLite file. Times are microseconds since the boot that the column `boot` names, and are
-- invalid after another boot.

PRAGMA application_id = 0x53696d62;
PRAGMA user_version = 1;

-- One row for each mutex that was ever held, never deleted: its token must outlive every owner.
CREATE TABLE IF NOT EXISTS simba_mutex (
    mutex       TEXT    NOT NULL PRIMARY KEY,
    owner       TEXT,                -- the contender's id; NULL: free
    session     INTEGER,             -- distinguishes two sessions of one id
    boot        TEXT,
    ttl_at      INTEGER,             -- the end of the ttl: the owner should have renewed by then
    until       INTEGER,             -- the end of the lease: the mutex is free
    token       INTEGER NOT NULL,    -- of the last acquisition
    acquired_at INTEGER              -- milliseconds since 1970, for display only
) STRICT, WITHOUT ROWID;

-- The queue: one row for each waiter. An entry expires unless its waiter polls again.
CREATE TABLE IF NOT EXISTS simba_waiter (
    mutex       TEXT    NOT NULL,
    place       INTEGER NOT NULL,    -- the smallest comes first
    session     INTEGER NOT NULL,
    boot        TEXT    NOT NULL,
    until       INTEGER NOT NULL,
    process     TEXT,                -- the thread that waits, see machine/linux.rs; NULL: unknown
    PRIMARY KEY (mutex, place),
    UNIQUE (mutex, session)
) STRICT, WITHOUT ROWID;
