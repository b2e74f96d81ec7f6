SELECT m.mutex::text, m.owner, m.token, m.acquired_at, m.ttl_at, m.until, clock_timestamp(),
    coalesce(q.waiters, 0)
FROM {mutex} m
LEFT JOIN (
    SELECT w.mutex, count(*) AS waiters FROM {waiter} w
    WHERE NOT w.watches AND w.until > clock_timestamp() AND {alive} GROUP BY w.mutex) q ON q.mutex = m.mutex
ORDER BY m.mutex COLLATE "C"
