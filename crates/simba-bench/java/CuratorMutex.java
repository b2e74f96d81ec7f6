import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Hands a mutex over between two clients, and prints the time of each hand-over in nanoseconds. */
public final class CuratorMutex {
    /** The first hand-overs are not printed: they run before the code is compiled. */
    private static final int WARM_UP = 300;

    public static void main(String[] args) throws Exception {
        String servers = args[0], path = args[1];
        int samples = Integer.parseInt(args[2]);
        long holdMillis = Long.parseLong(args[3]);
        AtomicInteger count = new AtomicInteger();
        AtomicLong released = new AtomicLong();
        Thread[] sides = new Thread[2];
        for (int side = 0; side < sides.length; side++) {
            CuratorFramework client = CuratorFrameworkFactory.newClient(servers, 16_000, 5_000, new RetryOneTime(100));
            client.start();
            client.blockUntilConnected();
            InterProcessMutex mutex = new InterProcessMutex(client, path);
            sides[side] = new Thread(() -> contend(mutex, count, released, samples, holdMillis));
        }
        for (Thread side : sides) {
            side.start();
        }
        for (Thread side : sides) {
            side.join();
        }
        System.exit(0);
    }

    private static void contend(InterProcessMutex mutex, AtomicInteger count, AtomicLong released, int samples, long holdMillis) {
        try {
            while (true) {
                mutex.acquire();
                long took = System.nanoTime() - released.get();
                int handovers = count.getAndIncrement();
                if (handovers > WARM_UP && handovers <= WARM_UP + samples) {
                    System.out.println(took);
                }
                // Long enough for the other side to join the queue again.
                Thread.sleep(handovers < WARM_UP ? 1 : holdMillis);
                released.set(System.nanoTime());
                mutex.release();
                if (handovers > WARM_UP + samples) {
                    return;
                }
            }
        } catch (Exception broken) {
            throw new IllegalStateException(broken);
        }
    }
}
