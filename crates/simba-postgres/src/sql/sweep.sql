-- Forgets what crashed clients left behind long ago.
WITH old AS (
    SELECT w.mutex, w.session FROM {waiter} w
    WHERE w.until < clock_timestamp() - interval '1 minute' FOR UPDATE SKIP LOCKED
)
DELETE FROM {waiter} d USING old WHERE d.mutex = old.mutex AND d.session = old.session
