//! One plot: lines with the spread of each point, or bars. Drawn without fonts: the viewer has some.

use core::ops::Range;

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
/// What came in the way of drawing, as a text: plotters' errors borrow from what is drawn on.
type Drawn = Result<(), String>;

/// One plot.
pub(super) struct Chart {
    /// Its file's name, without an end.
    pub(super) file: &'static str,
    pub(super) title: &'static str,
    /// Where the figures are from.
    pub(super) source: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) body: Body,
}

pub(super) struct Axis {
    pub(super) label: &'static str,
    /// Whether equal distances are equal factors.
    pub(super) log: bool,
}

pub(super) enum Body {
    /// Points at numbers.
    Lines(Vec<Line>),
    /// Bars at names, from below upwards, along the x axis; there is no y axis then.
    Bars(Vec<(String, f64)>),
}

pub(super) struct Line {
    pub(super) name: String,
    /// In order of x.
    pub(super) points: Vec<Point>,
}

#[derive(Clone, Copy)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

const SIZE: (u32, u32) = (860, 480);
const FONT: &str = "sans-serif";
/// Thin lines between two that have a number.
const LIGHT: usize = 4;
/// Distinct also for those who see few colours, and on paper by their order.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(86, 180, 233),
];

fn colour(at: usize) -> RGBColor {
    COLOURS.get(at % COLOURS.len()).copied().unwrap_or(BLACK)
}

impl Chart {
    /// The SVG text.
    pub(super) fn svg(&self) -> Result<String, String> {
        let mut text = String::new();
        self.draw(&mut text).map(|()| text)
    }

    fn draw(&self, text: &mut String) -> Drawn {
        let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(said)?;
        let root = root.margin(8, 8, 8, 16).titled(self.title, (FONT, 20)).map_err(said)?;
        let root = root.titled(&self.source, (FONT, 12)).map_err(said)?;
        match &self.body {
            Body::Lines(lines) => {
                let x = range(lines.iter().flat_map(|line| line.points.iter().map(|point| point.x)), self.x.log);
                let mut y = range(lines.iter().flat_map(|line| line.points.iter().flat_map(|point| [point.min, point.max])), self.y.log);
                // Room for the names of the lines, which stand at the top.
                y.end *= if self.y.log { 2.0 } else { 1.35 };
                match (self.x.log, self.y.log) {
                    (true, true) => self.lines(&root, lines, x.log_scale(), y.log_scale()),
                    (true, false) => self.lines(&root, lines, x.log_scale(), y),
                    (false, true) => self.lines(&root, lines, x, y.log_scale()),
                    (false, false) => self.lines(&root, lines, x, y),
                }
            }
            Body::Bars(bars) => {
                let mut x = range(bars.iter().map(|(_, value)| *value), self.x.log);
                if self.x.log {
                    self.bars(&root, bars, x.start, x.clone().log_scale())
                } else {
                    x.start = 0.0;
                    self.bars(&root, bars, 0.0, x)
                }
            }
        }?;
        root.present().map_err(said)
    }

    fn lines<X, Y>(&self, root: &Area<'_>, lines: &[Line], x: X, y: Y) -> Drawn
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut builder = ChartBuilder::on(root);
        let mut chart = builder.x_label_area_size(44).y_label_area_size(72).margin_right(16).build_cartesian_2d(x, y).map_err(said)?;
        chart
            .configure_mesh()
            .max_light_lines(LIGHT)
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .label_style((FONT, 13))
            .axis_desc_style((FONT, 14))
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .draw()
            .map_err(said)?;
        for (at, line) in lines.iter().enumerate() {
            let colour = colour(at);
            let middle = line.points.iter().map(|point| (point.x, point.median));
            chart
                .draw_series(LineSeries::new(middle.clone(), colour.stroke_width(2)))
                .map_err(said)?
                .label(line.name.as_str())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            chart.draw_series(middle.map(|middle| Circle::new(middle, 3, colour.filled()))).map_err(said)?;
            let spreads = line.points.iter().map(|point| PathElement::new([(point.x, point.min), (point.x, point.max)], colour.mix(0.5)));
            chart.draw_series(spreads).map_err(said)?;
        }
        let mut labels = chart.configure_series_labels();
        labels.position(SeriesLabelPosition::UpperLeft).label_font((FONT, 13));
        labels.background_style(WHITE.mix(0.85)).border_style(BLACK.mix(0.3)).draw().map_err(said)
    }

    fn bars<X>(&self, root: &Area<'_>, bars: &[(String, f64)], from: f64, x: X) -> Drawn
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
    {
        let count = u32::try_from(bars.len()).map_err(said)?;
        let mut builder = ChartBuilder::on(root);
        let mut chart = builder.x_label_area_size(44).margin_right(16).build_cartesian_2d(x, 0.0..f64::from(count)).map_err(said)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .max_light_lines(LIGHT)
            .x_desc(self.x.label)
            .label_style((FONT, 13))
            .axis_desc_style((FONT, 14))
            .x_label_formatter(&|value| number(*value))
            .draw()
            .map_err(said)?;
        for (at, (name, value)) in (0..count).zip(bars) {
            let (low, high) = (f64::from(at) + 0.12, f64::from(at) + 0.88);
            // Pale, since the name stands in it.
            let bar = Rectangle::new([(from, low), (value.max(from), high)], colour(0).mix(0.35).filled());
            chart.draw_series([bar]).map_err(said)?;
            let text = Text::new(format!("{name}: {}", number(*value)), (from, f64::midpoint(low, high) + 0.12), (FONT, 13));
            chart.draw_series([text]).map_err(said)?;
        }
        Ok(())
    }
}

fn said(error: impl core::fmt::Display) -> String {
    error.to_string()
}

/// What holds all values: powers of ten where factors count, else from zero.
fn range(values: impl Iterator<Item = f64>, log: bool) -> Range<f64> {
    let usable = |value: &f64| value.is_finite() && (!log || *value > 0.0);
    let (low, high) =
        values.filter(usable).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    match (low <= high, log) {
        (false, _) => 1.0..10.0,
        (true, true) => {
            let (low, high) = (10_f64.powf(low.log10().floor()), 10_f64.powf(high.log10().ceil()));
            low..high.max(low * 10.0)
        }
        (true, false) => 0.0..(high * 1.05).max(f64::MIN_POSITIVE),
    }
}

/// As short as it can be read.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => trimmed(format!("{value:.1}")),
        size if size >= 0.01 => trimmed(format!("{value:.3}")),
        _ => format!("{value:.1e}"),
    }
}

/// Without zeros after the point.
fn trimmed(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Axis, Body, Chart, Line, Point, number, range};

    fn chart(body: Body, log: bool) -> Chart {
        Chart {
            file: "a",
            title: "A title",
            source: "a source".to_owned(),
            x: Axis { label: "across", log },
            y: Axis { label: "up", log },
            body,
        }
    }

    #[test]
    fn every_line_and_every_bar_is_there() {
        let line = |name: &str| Line {
            name: name.to_owned(),
            points: (1..4).map(|x| f64::from(x) * 10.0).map(|x| Point { x, min: x, median: 2.0 * x, max: 3.0 * x }).collect(),
        };
        for log in [true, false] {
            let svg = chart(Body::Lines(vec![line("floor"), line("ours")]), log).svg().expect("a plot");
            for text in ["A title", "a source", "across", "up", "floor", "ours", "</svg>"] {
                assert!(svg.contains(text), "{text}: {svg}");
            }
            // Two lines, each with three points and their spreads.
            assert_eq!(svg.matches("<circle").count(), 6, "{svg}");
            let svg = chart(Body::Bars(vec![("first".to_owned(), 1.0), ("second".to_owned(), 250.4)]), log).svg().expect("a plot");
            assert!(svg.contains("first: 1") && svg.contains("second: 250"), "{svg}");
        }
    }

    #[test]
    fn names_are_text_in_the_svg() {
        let svg = chart(Body::Bars(vec![("a < b & c".to_owned(), 1.0)]), false).svg().expect("a plot");
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
    }

    #[test]
    fn a_range_holds_all_values() {
        assert_eq!(range([2.0, 300.0].into_iter(), true), 1.0..1000.0);
        assert_eq!(range([0.0, f64::NAN, 20.0].into_iter(), true), 10.0..100.0);
        assert!(range([2.0, 300.0].into_iter(), false).contains(&300.0));
        assert_eq!(range(core::iter::empty(), false), 1.0..10.0);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, 0.5, 1.0, 12.34, 100.0, 20_000.0].map(number), ["0", "0.5", "1", "12.3", "100", "20000"]);
    }
}
