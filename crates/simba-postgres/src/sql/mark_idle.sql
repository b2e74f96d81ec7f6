-- Marks the mutex as having no waiter ($2) or no watcher ($3), unless the queue changed since these numbers were read.
-- A locked row keeps its marks until the next release.
WITH expired AS (
    SELECT w.session FROM {waiter} w
    WHERE w.mutex = $1 AND w.until <= clock_timestamp() FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {waiter} d USING expired WHERE d.mutex = $1 AND d.session = expired.session
), due AS (
    SELECT h.mutex FROM {mutex} h
    WHERE {unsynced} AND h.mutex = $1 AND ((h.waited > 0 AND h.waited = $2) OR (h.watched > 0 AND h.watched = $3))
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {mutex} m SET
    waited = CASE WHEN m.waited = $2 AND NOT EXISTS (
        SELECT FROM {waiter} w WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp())
        THEN -m.waited ELSE m.waited END,
    watched = CASE WHEN m.watched = $3 AND NOT EXISTS (
        SELECT FROM {waiter} w WHERE w.mutex = $1 AND w.watches AND w.until > clock_timestamp())
        THEN -m.watched ELSE m.watched END
FROM due WHERE m.mutex = $1
