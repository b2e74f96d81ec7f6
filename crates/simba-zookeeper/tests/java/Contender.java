import java.io.FileOutputStream;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.Random;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.leader.LeaderLatch;
import org.apache.curator.retry.RetryForever;

/** Leads repeatedly for 30 to 130 ms, and writes to the ledger while it leads. */
public final class Contender {
    private static final int SESSION_MS = 1500;

    public static void main(String[] args) throws Exception {
        String servers = args[0], path = args[1], id = args[2], ledger = args[3];
        CuratorFramework client = CuratorFrameworkFactory.newClient(servers, SESSION_MS, 1000, new RetryForever(50));
        client.start();
        Random random = new Random();
        try (FileOutputStream out = new FileOutputStream(ledger, true)) {
            for (int tenure = 0; ; tenure++) {
                LeaderLatch latch = new LeaderLatch(client, path, id);
                latch.start();
                latch.await();
                // A latch does not detect that its process was paused for longer than its session lasts. The server
                // keeps the session for its whole timeout from this request on.
                long sure = System.nanoTime() + SESSION_MS * 1_000_000L;
                String node = latch.getLastPathIsLeader();
                boolean leads = node != null && client.checkExists().forPath(node) != null;
                long end = System.nanoTime() + (30 + random.nextInt(100)) * 1_000_000L;
                while (leads && System.nanoTime() < end) {
                    // Taken before the check. A latch that leads at the check has led at this time, even if the line
                    // is written late.
                    long now = ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
                    leads = latch.hasLeadership() && System.nanoTime() < sure;
                    if (leads) {
                        String line = "jvm " + id + "." + tenure + " " + now + "\n";
                        out.write(line.getBytes(StandardCharsets.UTF_8));
                        Thread.sleep(2);
                    }
                }
                latch.close(LeaderLatch.CloseMode.NOTIFY_LEADER);
            }
        }
    }
}
