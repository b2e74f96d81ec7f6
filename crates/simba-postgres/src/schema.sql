-- One row per mutex, never deleted: its token must outlive every owner.
CREATE TABLE IF NOT EXISTS {mutex} (
    mutex varchar(66) COLLATE "C" PRIMARY KEY,
    owner text NOT NULL,
    -- Tells two contenders of one id apart.
    session text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    renewed_at timestamptz NOT NULL,
    ttl_at timestamptz NOT NULL,
    until timestamptz NOT NULL,
    -- Each changes with its part of the queue, and is above zero while somebody may be in it.
    waited bigint NOT NULL DEFAULT 0,
    watched bigint NOT NULL DEFAULT 0
-- Room on every page for the next version of its rows: no index changes, no bloat.
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
-- Who waits and who watches. A crash of the server empties it; whoever waits comes again.
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
