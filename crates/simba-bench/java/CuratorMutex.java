import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Passes a mutex to and fro between two clients, and prints in nanoseconds how long each hand-over took. */
public final class CuratorMutex {
    /** The first ones are slow: they are compiled meanwhile. */
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
            sides[side] = new Thread(() -> pass(mutex, count, released, samples, holdMillis));
        }
        for (Thread side : sides) {
            side.start();
        }
        for (Thread side : sides) {
            side.join();
        }
        System.exit(0);
    }

    private static void pass(InterProcessMutex mutex, AtomicInteger count, AtomicLong released, int samples, long holdMillis) {
        try {
            while (true) {
                mutex.acquire();
                long took = System.nanoTime() - released.get();
                int passed = count.getAndIncrement();
                if (passed > WARM_UP && passed <= WARM_UP + samples) {
                    System.out.println(took);
                }
                // The other side is back in the queue by then.
                Thread.sleep(passed < WARM_UP ? 1 : holdMillis);
                released.set(System.nanoTime());
                mutex.release();
                if (passed > WARM_UP + samples) {
                    return;
                }
            }
        } catch (Exception broken) {
            throw new IllegalStateException(broken);
        }
    }
}
