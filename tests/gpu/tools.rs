//! The kernels outside of rounds, on CUDA as on the host: made values to the bit, and sums of what is read.

use graph::{Device, Emission, host::HostOptions};
use half::bf16;
use kernels::{random, read};

use crate::rig;

pub(crate) const TESTS: &[(&str, fn())] = &[(
    "made_values_have_the_hosts_bits_and_every_word_is_read",
    made_values_have_the_hosts_bits_and_every_word_is_read,
)];

fn made_values_have_the_hosts_bits_and_every_word_is_read() {
    for (count, blocks) in [(8u64, 1u32), (4096 * 3 + 8, 7), (1 << 22, 1056)] {
        let on = |device: Device| {
            device.prepare(kernels::source::ALL).unwrap();
            let made = device.arena("made", 2 * count as usize).unwrap();
            let sums = device.arena("sums", 4 * blocks as usize).unwrap();
            let mut emission = Emission::new();
            let to = made.base();
            let args = random::Args { to, count, seed: 11, scale: 0.37, zero: 0 };
            emission.launch::<random::Random<bf16>>(&args).unwrap();
            let (words, quads) = (to.cast(), count / 8);
            let args = read::Args { words, sums: sums.base().cast(), quads, blocks, zero: 0 };
            emission.launch::<read::Read>(&args).unwrap();
            let stream = device.stream();
            stream.run(emission, &[made.clone(), sums.clone()]).unwrap();
            stream.synchronize().unwrap();
            let values: Vec<u16> = made.read(made.base().cast(), count as usize).unwrap();
            (values, rig::words(&sums, blocks as usize))
        };
        let host = on(Device::host(HostOptions::default()));
        let cuda = on(rig::open(true));
        assert!(host.0 == cuda.0, "{count} made values differ");
        assert_eq!(host.1, cuda.1, "sums over {blocks} blocks");
    }
}
