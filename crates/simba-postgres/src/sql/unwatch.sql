-- Deletes the watcher's entries of these mutexes. An entry that another transaction has locked expires.
WITH due AS (
    SELECT w.mutex FROM {waiter} w WHERE w.session = $2 AND w.mutex = ANY($1::text[]) FOR UPDATE SKIP LOCKED
)
DELETE FROM {waiter} w USING due WHERE w.mutex = due.mutex AND w.session = $2
