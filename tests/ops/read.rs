//! Sums of words: every word once, in its own sum.

use kernels::read::{Args, Read};
use tests::check::{Draw, Scene};

tests::tests! {
    any: every_word_is_in_the_sum_of_its_run;
    host: words_off_their_grid_are_refused;
}

fn every_word_is_in_the_sum_of_its_run() {
    let mut draw = Draw::new(5);
    for (quads, blocks) in [(1, 1), (255, 3), (256, 3), (257, 3), (256 * 7 + 19, 3), (300_000, 5), (64, 9)] {
        let words: Vec<u32> = (0..4 * quads).map(|_| draw.below(1 << 32) as u32).collect();
        let mut wanted = vec![0u32; blocks];
        for (quad, words) in words.chunks(4).enumerate() {
            let sum = &mut wanted[quad / 256 % blocks];
            *sum = words.iter().fold(*sum, |sum, word| sum.wrapping_add(*word));
        }
        let mut scene = Scene::new();
        let args = Args {
            words: scene.input("words", &words),
            sums: scene.output("sums", blocks),
            quads: quads as u64,
            blocks: blocks as u32,
            zero: 0,
        };
        scene.run::<Read>(&args);
        assert_eq!(scene.read(args.sums, blocks), wanted, "{quads} quads, {blocks} sums");
    }
}

fn words_off_their_grid_are_refused() {
    let mut scene = Scene::new();
    let args = Args {
        words: scene.input("words", &[0u32; 16]),
        sums: scene.output("sums", 1),
        quads: 2,
        blocks: 1,
        zero: 0,
    };
    let off = Args { words: args.words.at(1), ..args };
    for args in [off, Args { quads: 0, ..args }, Args { blocks: 0, ..args }] {
        assert!(scene.refused::<Read>(&args).contains("multiple of 16"));
    }
}
