-- Wakes the next waiter if the mutex is free, and all who watch it. Tells whether anybody waits or watches.
SELECT
    m.waited,
    CASE WHEN m.until <= statement_timestamp() THEN (
        SELECT count(pg_notify(n.channel, 'turn ' || n.session)) FROM (
            SELECT w.channel, w.session FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > statement_timestamp()
            ORDER BY w.place LIMIT 1) n)
        ELSE (
        SELECT count(*) FROM (
            SELECT FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > statement_timestamp() LIMIT 1) n)
        END,
    m.watched,
    (SELECT count(pg_notify(w.channel, 'owner ' || w.mutex)) FROM {waiter} w
        WHERE w.mutex = $1 AND w.watches AND w.until > statement_timestamp())
FROM {mutex} m WHERE m.mutex = $1
