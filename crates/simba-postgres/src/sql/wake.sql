-- Notifies the next waiter if the mutex is free, and all watchers. Returns whether there are waiters and watchers.
SELECT
    m.waited,
    CASE WHEN m.until <= clock_timestamp() THEN ({next})
        ELSE EXISTS (SELECT FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp())::int END,
    m.watched,
    (SELECT count({notify}(w.channel, 'owner ' || w.mutex)) FROM {waiter} w
        WHERE w.mutex = $1 AND w.watches AND w.until > clock_timestamp())
FROM {mutex} m WHERE {unsynced} AND m.mutex = $1
