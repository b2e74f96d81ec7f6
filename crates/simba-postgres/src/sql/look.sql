-- Takes the mutex if it is free and nobody came before us, and leaves the queue; else tells who has it, as it
-- was before the row could be locked. What is ours has a number of watchers, all else has none.
WITH took AS (
    UPDATE {mutex} m SET
        owner = $2,
        session = $3,
        token = CASE WHEN m.session = $3 AND m.until > statement_timestamp() AND m.token <> $6 THEN m.token
            ELSE greatest(m.token + 1, {micros}) END,
        acquired_at = CASE WHEN m.session = $3 AND m.until > statement_timestamp() AND m.token <> $6
            THEN m.acquired_at ELSE statement_timestamp() END,
        renewed_at = statement_timestamp(),
        ttl_at = statement_timestamp() + make_interval(secs => $4),
        until = statement_timestamp() + make_interval(secs => $5),
        -- Whoever frees it meanwhile sees that the queue changed.
        waited = CASE WHEN m.waited > 0 THEN m.waited + 1 ELSE m.waited - 1 END
    WHERE {bound} m.mutex = $1 AND (
        (m.session = $3 AND m.until > statement_timestamp())
        OR (m.until <= statement_timestamp() AND NOT EXISTS (
            SELECT FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > statement_timestamp() AND w.session <> $3
                AND w.place < coalesce((SELECT o.place FROM {waiter} o WHERE o.mutex = $1 AND o.session = $3),
                    9223372036854775807))))
    RETURNING m.owner, m.session, m.token, m.until, m.watched
), gone AS (
    DELETE FROM {waiter} w USING took WHERE w.mutex = $1 AND w.session = $3
)
SELECT owner, session, token, until, statement_timestamp(), NULL::timestamptz, watched
FROM took
UNION ALL
SELECT m.owner, m.session, m.token, m.until, statement_timestamp(),
    (SELECT o.until FROM {waiter} o WHERE o.mutex = $1 AND o.session = $3), NULL::bigint
FROM {mutex} m WHERE m.mutex = $1 AND NOT EXISTS (SELECT FROM took)
