-- Creates the rows of the mutexes that have none. They are free: a call that arrives late, after its session released,
-- creates nothing that is held. Only a row that does not exist is inserted: ON CONFLICT waits for a transaction that
-- changes an existing one. That is a subquery in an expression: the planner may make a join of NOT EXISTS, and read all
-- rows for it. Ordered by name, so that two handles cannot deadlock.
INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until, watched)
SELECT n.mutex, '', '', 0, 'epoch', 'epoch', 'epoch', 'epoch', {watched} FROM unnest($1::text[]) AS n (mutex)
WHERE {unsynced} AND (SELECT true FROM {mutex} e WHERE e.mutex = n.mutex) IS NULL
ORDER BY n.mutex COLLATE "C" ON CONFLICT (mutex) DO NOTHING RETURNING mutex
