import java.io.FileOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Random;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.leader.LeaderLatch;
import org.apache.curator.retry.RetryForever;

/** Leads again and again for a little while, and writes to the ledger for as long as it does. */
public final class Contender {
    public static void main(String[] args) throws Exception {
        String servers = args[0], path = args[1], id = args[2], ledger = args[3];
        CuratorFramework client = CuratorFrameworkFactory.newClient(servers, 1500, 1000, new RetryForever(50));
        client.start();
        Random random = new Random();
        try (FileOutputStream out = new FileOutputStream(ledger, true)) {
            for (int tenure = 0; ; tenure++) {
                LeaderLatch latch = new LeaderLatch(client, path, id);
                latch.start();
                latch.await();
                long end = System.nanoTime() + (30 + random.nextInt(100)) * 1_000_000L;
                while (System.nanoTime() < end && latch.hasLeadership()) {
                    String line = "jvm " + id + "." + tenure + " " + System.currentTimeMillis() + "\n";
                    out.write(line.getBytes(StandardCharsets.UTF_8));
                    Thread.sleep(2);
                }
                latch.close(LeaderLatch.CloseMode.NOTIFY_LEADER);
            }
        }
    }
}
