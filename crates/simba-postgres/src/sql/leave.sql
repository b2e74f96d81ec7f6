-- Leaves the queue, under the lock of the row: whoever frees the mutex at the same time sees it, or is seen.
WITH asked AS (
    UPDATE {mutex} m SET waited = CASE WHEN m.waited > 0 THEN m.waited + 1 ELSE m.waited - 1 END
    WHERE {bound} m.mutex = $1
    RETURNING m.until <= clock_timestamp() AS free, m.waited
), gone AS (
    DELETE FROM {waiter} w USING asked WHERE w.mutex = $1 AND w.session = $2
)
SELECT free AND waited > 0 FROM asked
