-- Deletes the entries of crashed clients, a minute after their end.
WITH expired AS (
    SELECT w.mutex, w.session FROM {waiter} w
    WHERE w.until < clock_timestamp() - interval '1 minute' FOR UPDATE SKIP LOCKED
)
DELETE FROM {waiter} d USING expired WHERE d.mutex = expired.mutex AND d.session = expired.session
