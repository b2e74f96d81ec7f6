SELECT m.mutex::text, m.owner, m.token, m.acquired_at, m.ttl_at, m.until, clock_timestamp(),
    (SELECT count(*) FROM {waiter} w
        WHERE w.mutex = m.mutex AND NOT w.watches AND w.until > clock_timestamp() AND {alive})
FROM {mutex} m WHERE m.mutex = $1
