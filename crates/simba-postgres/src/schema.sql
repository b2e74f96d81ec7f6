-- One row per mutex, never deleted: its token must outlast every tenure.
CREATE TABLE IF NOT EXISTS {mutex} (
    mutex varchar(66) COLLATE "C" PRIMARY KEY,
    owner text NOT NULL,
    -- Distinguishes contenders with the same id.
    session text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    renewed_at timestamptz NOT NULL,
    ttl_at timestamptz NOT NULL,
    until timestamptz NOT NULL,
    -- Each changes with its part of the queue, and is positive while that may have entries.
    waited bigint NOT NULL DEFAULT 0,
    watched bigint NOT NULL DEFAULT 0
-- Leaves room on every page for new row versions: no index updates, no bloat.
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
-- Waiters and watchers. A crash of the server empties it; the waiters join again.
CREATE UNLOGGED TABLE IF NOT EXISTS {waiter} (
    mutex varchar(66) COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    contender text NOT NULL,
    channel text NOT NULL,
    watches boolean NOT NULL,
    place bigint GENERATED ALWAYS AS IDENTITY,
    until timestamptz NOT NULL,
    PRIMARY KEY (mutex, session)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
CREATE INDEX IF NOT EXISTS {place} ON {waiter} (mutex, place);
