-- Wakes the next waiter if the mutex is free, and all who watch it. Tells whether anybody waits or watches.
SELECT
    m.waited,
    CASE WHEN m.until <= clock_timestamp() THEN ({next})
        ELSE (
        SELECT count(*) FROM (
            SELECT FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp() LIMIT 1) n)
        END,
    m.watched,
    (SELECT count({notify}(w.channel, 'owner ' || w.mutex)) FROM {waiter} w
        WHERE w.mutex = $1 AND w.watches AND w.until > clock_timestamp())
FROM {mutex} m WHERE m.mutex = $1
