SELECT m.mutex::text, m.owner, m.token, m.acquired_at, m.ttl_at, m.until, statement_timestamp(),
    (SELECT count(*) FROM {waiter} w
        WHERE w.mutex = m.mutex AND NOT w.watches AND w.until > statement_timestamp())
FROM {mutex} m WHERE m.mutex = $1
